"""What the local backend does where it may do less, and what a manager that was killed leaves to the next."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.manager import make_sandbox
from sandbox.protocol import Job, Limits, Outcome, Result

ROOT = Path(__file__).parent.parent
LIMITS = Limits(wall_s=5.0, memory_mb=200, processes=24, scratch_mb=8, scratch_files=500)
NOBODY = 65534


async def run(program: str, data: Path, **options: object) -> Result:
    sandbox = make_sandbox("weak", state_dir=data.parent / "state", max_running=1, **options)
    await sandbox.start()
    try:
        return await sandbox.run(Job("r", program, str(data), limits=LIMITS))
    finally:
        await sandbox.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("a\n1\n")
    return tmp_path / "data"


async def test_without_isolation_it_runs_and_says_so(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "print(open('data/train.csv').read())\nopen('submission.csv', 'w').write('x')"
    result = await run(program, data, cgroups=False)
    assert result.outcome is Outcome.OK, result
    assert result.output_head == "a\n1\n\n"
    assert "weak_isolation" in result.flags
    said = capsys.readouterr().err
    assert said.count("WEAK ISOLATION") == 1
    assert "network" in said
    assert (data / "train.csv").exists()  # the link to it was removed, not what it links to


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("kept = [bytearray(1 << 20) for _ in range(400)]\nimport time\ntime.sleep(9)", Outcome.OOM),
        ("import os, time\nfor _ in range(40):\n    if os.fork() == 0: time.sleep(9)\ntime.sleep(9)", Outcome.PIDS),
        ("import time\ntime.sleep(9)", Outcome.TIMEOUT),
    ],
)
async def test_polling_stands_in_for_cgroups(data: Path, program: str, outcome: Outcome) -> None:
    began = time.monotonic()
    result = await run(program, data, cgroups=False)
    assert result.outcome is outcome, result
    assert time.monotonic() - began < 8


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder with a copy of the sandbox that an ordinary user can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    shutil.copytree(ROOT / "sandbox", folder / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "data").mkdir()
    (folder / "data" / "train.csv").write_text("a\n1\n")
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="every other test runs as an ordinary user already")
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="no /usr/bin/python3 for an ordinary user")
@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("import os\nprint(os.listdir('.'))\nopen('submission.csv', 'w').write('id\\n')", "ok"),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", "disk"),
        ("import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(9)", "pids"),
        ("import socket\nsocket.create_connection(('1.1.1.1', 80), 2)", "user_error"),
        ("import time\nwhile True: time.sleep(1)", "timeout"),
        ("import os\nos.symlink('/etc/passwd', 'submission.csv')", "hack"),
    ],
)
def test_an_ordinary_user_has_a_box_too(everybodys: Path, program: str, outcome: str) -> None:
    (everybodys / "program.py").write_text(program)
    argv = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "/usr/bin/python3"]
    argv += ["-m", "sandbox", "run", "program.py", "--data", "data", "--wall-s", "2", "--processes", "24"]
    env = {"TMPDIR": str(everybodys / "tmp"), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run([*argv, "--scratch-mb", "8"], cwd=everybodys, env=env, capture_output=True, text=True)
    assert f"outcome     {outcome}" in answer.stdout, answer
    assert "bubblewrap, no cgroups" in answer.stdout
    assert os.listdir(next((everybodys / "tmp").glob("*/local"))) == []


OWNER = """
import asyncio, sys
from sandbox.manager import make_sandbox
from sandbox.protocol import Job

async def main():
    from pathlib import Path
    sandbox = make_sandbox(sys.argv[1], state_dir=Path(sys.argv[2]), max_running=2)
    await sandbox.start()
    program = "import os, time\\nif os.fork() == 0: os.setsid()\\nprint('up')\\nwhile True: time.sleep(1)"
    runs = [asyncio.ensure_future(sandbox.run(Job("r", program, sys.argv[3]))) for _ in range(2)]
    await asyncio.sleep(float(sys.argv[4]))
    print("running", flush=True)
    await asyncio.gather(*runs)

asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.05, 1.5])
@pytest.mark.parametrize(
    "kind", [pytest.param("local", marks=pytest.mark.bwrap), pytest.param("docker", marks=pytest.mark.docker)]
)
async def test_the_next_start_removes_what_a_killed_manager_left(kind: str, after_s: float, data: Path) -> None:
    state = data.parent / "state"
    argv = [sys.executable, "-c", OWNER, kind, str(state), str(data), str(after_s)]
    owner = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout is not None
    if await owner.stdout.readline() != b"running\n":
        pytest.skip("no cgroups, or no image: sandbox/build_image")
    (name,) = os.listdir(state)
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    await asyncio.sleep(0.5)  # a create that was on its way to the engine arrives
    sandbox = make_sandbox(kind, state_dir=state)
    await sandbox.start()
    assert name not in os.listdir(state)
    assert str(state / name) not in Path("/proc/mounts").read_text()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/jaxrl-sandbox.{name}*"))
    await sandbox.close()
    if kind == "docker":
        argv = ["docker", "ps", "--all", "--quiet", "--filter", f"label=jaxrl-sandbox.owner={name}"]
        assert subprocess.run(argv, capture_output=True).stdout == b""
