"""Prints are added after operations that were carried out, and only prints: rule by rule, and on generated programs."""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap
import time
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.instrument import instrument, strip, verify
from sandbox.markers import MILESTONES, marker_line, parse_marker

NONCE = "0123456789abcdef"


def planted(source: str) -> str:
    """The instrumented program with every print shown as <milestone>; checks what holds for any program."""
    source = textwrap.dedent(source).lstrip("\n")
    result = instrument(source, NONCE)
    assert result.refused == ""
    assert verify(source, result.source, NONCE)
    assert strip(result.source, NONCE).rstrip("\n") == source.rstrip("\n")
    assert {name for name, _ in result.sites} == set(result.planned)
    text = result.source
    for name in MILESTONES:
        call = (
            f'__import__("builtins").print("{marker_line(NONCE, name)}", file=__import__("sys").__stdout__, flush=True)'
        )
        text = text.replace(call, f"<{name}>")
    assert NONCE not in text
    assert text.rstrip("\n").count("\n") <= source.rstrip("\n").count("\n") + 1  # a line at the end at most: none moved
    return text


def sites(source: str) -> list[tuple[str, int]]:
    planted(source)
    return list(instrument(textwrap.dedent(source).lstrip("\n"), NONCE).sites)


def test_a_plain_program():
    text = planted("""
        '''What it does.'''
        from __future__ import annotations
        import pandas as pd
        from sklearn.ensemble import RandomForestClassifier
        train = pd.read_csv("data/train.csv")  # rows
        X = train.drop(columns=["id", "y"])
        model = RandomForestClassifier(n_estimators=10)
        model.fit(X, train["y"])
        test = pd.read_csv("data/test.csv")
        sub = test[["id"]]
        sub["y"] = model.predict_proba(test.drop(columns=["id"]))[:, 1]
        sub.to_csv("submission.csv", index=False)
    """)
    assert text.splitlines()[3:] == [
        "from sklearn.ensemble import RandomForestClassifier; <imported>",
        'train = pd.read_csv("data/train.csv"); <loaded_data>  # rows',
        'X = train.drop(columns=["id", "y"]); <made_features>',
        "model = RandomForestClassifier(n_estimators=10); <defined_model>",
        'model.fit(X, train["y"]); <trained>',
        'test = pd.read_csv("data/test.csv")',
        'sub = test[["id"]]',
        'sub["y"] = model.predict_proba(test.drop(columns=["id"]))[:, 1]; <predicted>',
        'sub.to_csv("submission.csv", index=False); <wrote_submission>',
    ]


PREFIX = "import numpy as np, pandas as pd\nfrom sklearn.pipeline import Pipeline\nfrom sklearn.svm import SVC\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("p = Pipeline([('m', SVC())]).fit(X, y).predict(T)", "defined_model trained predicted"),
        ("if ready: model.fit(X, y)", "trained"),
        ("a = 1; model.fit(X, y); b = 2", "trained"),
        ("model.fit(X, y);", "trained"),
        ("(model.fit(X, y))", "trained"),
        ("model.fit(\n    X,\n    y,\n)  # done", "trained"),
        ("model.fit(X, \\\n    y)", "trained"),
        ("é = 'ü'; model.fit(X, y); ß = 1", "trained"),
        ("f = lambda: model.fit(X, y)", ""),
        ("f = lambda: model.fit(X, y)\nf()", "trained"),
        ("ok and model.fit(X, y)", ""),
        ("model.fit(X, y) and ok", "trained"),
        ("p = model.predict(T) if ok else None", ""),
        ("g = (m.fit(X, y) for m in ms)", ""),
        ("g = list(m.fit(X, y) for m in ms)", "trained"),
        ("ps = [m.predict(T) for m in ms]", "predicted"),
        ("raise ValueError(model.fit(X, y))", ""),
        ("assert model.fit(X, y)", "trained"),
        ("model.fit(X)", ""),
        ("model = SVC()\nmodel.fit(X)", "defined_model trained"),
        ("from sklearn.preprocessing import StandardScaler\ns = StandardScaler()\ns.fit(X, y)", "made_features"),
        ("model.predict(X_val)", ""),
        ("model.predict(X_test)", "predicted"),
        ("model.predict(train.loc[:5])", ""),
        ("df = pd.read_csv('data/sample_submission.csv')", ""),
        ("read = pd.read_csv\ndf = read('x.csv')", "loaded_data"),
        ("import os\nDIR = 'data'\ndf = pd.read_csv(os.path.join(DIR, 'train.csv'))", "loaded_data"),
        ("a = np.loadtxt('data/train.csv')", "loaded_data"),
        ("text = open('data/description.md').read()", ""),
        ("rows = open('data/train.csv').readlines()", "loaded_data"),
        ("with open('data/train.csv') as f:\n    rows = list(f)\n", "loaded_data"),
        ("from pathlib import Path\nt = (Path('data') / 'train.csv').read_text()", "loaded_data"),
        ("out = 'submission.csv'\ndf.to_csv(out)", "wrote_submission"),
        ("df.to_csv('submissions.csv')", ""),
        ("df.to_csv('data/sample_submission.csv')", ""),
        ("df.to_csv()", ""),
        ("df.to_csv(path_or_buf='./submission.csv')", "wrote_submission"),
        ("with open('submission.csv', 'w') as f:\n    f.write('a')\n", "wrote_submission"),
        ("f = open('submission.csv', 'w')\nf.write('a')\nf.close()", "wrote_submission"),
        ("with open('submission.csv', 'w') as f:\n    df.to_csv(f)", "wrote_submission"),
        ("open('submission.csv', 'w').write('a')", "wrote_submission"),
        ("import lightgbm as lgb\nb = lgb.train({}, d)", "defined_model trained"),
        ("import torch.nn as nn\nnet = nn.Linear(2, 1)\nnet.train()", "defined_model"),
        ("import torch.nn as nn\nloss = nn.MSELoss()", ""),
        ("for x in xs:\n    loss(x).backward()\n    step()", "trained"),
        ("class Net(Module):\n    pass\nnet = Net()\np = net(X_test)", "defined_model predicted"),
        ("def f(X): return model.fit(X, y)\nm = f(X)", "trained"),
        ("def f(X):\n    if X: return model.fit(X, y)\nm = f(X)", ""),
        ("def f(X):\n    yield model.fit(X, y)\nm = f(X)", "trained"),  # inside, when it runs
        ("async def f(X): return model.fit(X, y)\nm = f(X)", ""),
        ("async def f(X): return model.fit(X, y)\nasync def g(): m = await f(X)", "trained"),
        ("df = pd.read_csv('a.csv')\nX = df[['a', 'b']]", "loaded_data made_features"),
        ("df = pd.read_csv('a.csv')\ny = df['y']", "loaded_data"),
        ("df = pd.read_csv('a.csv')\ncols = ['a', 'b']\nX, n = df[cols], 1", "loaded_data made_features"),
        ("df = pd.read_csv('a.csv')\nTARGET = 'y'\ny = df[TARGET]", "loaded_data"),
        ("df = pd.read_csv('a.csv')\nkept = df[df['a'] > 0]", "loaded_data"),
        ("df = pd.read_csv('a.csv')\ndf['z'] = df['a'] / df['b']", "loaded_data made_features"),
        ("params['lr'] = 0.1", ""),
        ("sub = pd.DataFrame(test)\nsub['y'] = 0\nsub.to_csv('submission.csv')", "wrote_submission"),
        ("match model.fit(X, y):\n    case _:\n        pass\n", "trained"),
        ("try:\n    model.fit(X, y)\nfinally:\n    pass", "trained"),
    ],
)  # fmt: skip
def test_rule(line, expected):
    source = PREFIX + line
    planted(source)
    assert instrument(source, NONCE).planned == ("imported", *expected.split())


def test_a_milestone_is_printed_again_only_where_the_first_print_may_not_have_run():
    text = planted("""
        import pandas as pd
        if a:
            x = pd.read_csv("a.csv"); y = pd.read_csv("b.csv")
        else:
            x = pd.read_csv("c.csv")
        z = pd.read_csv("d.csv")
        w = pd.read_csv("e.csv")
    """)
    assert text.count("<loaded_data>") == 3
    assert text.splitlines()[2] == '    x = pd.read_csv("a.csv"); <loaded_data>; y = pd.read_csv("b.csv")'


def test_where_a_print_after_a_block_stands():
    body = 'with open("submission.csv", "w") as f:\n    f.write("")\n'
    header = "import csv\n"
    assert planted(header + body + "# why\nx = 1\n").splitlines()[3] == "<wrote_submission># why"
    assert planted(header + body + "\nx = 1\n").splitlines()[3] == "<wrote_submission>"
    assert planted(header + body + "x = 1\n").splitlines()[3] == "<wrote_submission>; x = 1"
    assert planted(header + body).splitlines()[3] == "<wrote_submission>"
    assert planted(header + body.rstrip("\n")).splitlines()[3] == "<wrote_submission>"
    assert planted(header + body + "for x in xs:\n    pass\n").splitlines()[2] == '    f.write(""); <wrote_submission>'
    inner = "def main():\n" + textwrap.indent(body, "    ") + "main()\n"
    assert planted(header + inner).splitlines()[3] == '        f.write(""); <wrote_submission>'
    inner = "def main():\n" + textwrap.indent(body, "    ") + "\n\nmain()\n"
    assert planted(header + inner).splitlines()[4] == "    <wrote_submission>"


def test_imports_are_done_after_the_last_before_the_first_operation():
    assert sites("""
        '''Doc.'''
        import os
        try:
            import lightgbm
        except ImportError:
            lightgbm = None
        import pandas as pd
        df = pd.read_csv("a.csv")
        import json
    """) == [("imported", 7), ("loaded_data", 8)]  # fmt: skip
    assert sites("def main():\n    import pandas as pd\n    pd.read_csv('a.csv')\nmain()\n")[0] == ("imported", 2)
    assert sites("from __future__ import annotations\nx = 1\n") == []


@pytest.mark.parametrize("source", ["def f(:\n", "x = 1\0", "(" * 500, "x = '\ud800'", "-" * 20_000 + "1", "  x\n y"])
def test_what_cannot_be_parsed_runs_as_it_is(source):
    result = instrument(source, NONCE)
    assert (result.source, result.planned) == (source, ()) and result.refused


@pytest.mark.parametrize("nonce", ["", "short", "has space in it", 'a"; import os #', "@@12345678"])
def test_a_bad_nonce_is_refused(nonce):
    with pytest.raises(ValueError, match="nonce"):
        instrument("x = 1", nonce)


def test_a_program_that_holds_the_nonce_is_refused():
    with pytest.raises(ValueError, match="occurs"):
        instrument(f"print('@@{NONCE}:trained')", NONCE)


def test_odd_texts_survive():
    for source in (
        "",
        "\n",
        "\ufeffimport os\n",
        "import os\r\nx = 1\r\n",
        "import os\rx = 1\r",
        "#!/bin/x\n",
        "import os\n\x0c\nx = '''\n\n# no\n'''\n",
        "if a:\n\timport os\n\tm.fit(a, b)\n",
        r"x = '\d'; import os",
    ):
        result = instrument(source, NONCE)
        assert result.refused == "", repr(source)
        assert strip(result.source, NONCE) == source
    assert instrument("\ufeffimport os\n", NONCE).planned == ("imported",)


def test_only_prints_of_this_nonce_may_be_added():
    source = "import os\nmodel.fit(X, y)\n"
    good = instrument(source, NONCE).source
    assert verify(source, good, NONCE)
    assert not verify(source, good, "another0nonce")
    assert not verify(source, good.replace("X, y", "X, z"), NONCE)
    assert not verify(source, good + "print('hello')\n", NONCE)
    assert not verify(source, good.replace("trained", "won"), NONCE)
    assert not verify(source, source + f"print('@@{NONCE}:trained', os.remove('x'))\n", NONCE)


def test_nested_pipelines_and_long_chains_take_no_exponential_time():
    started = time.monotonic()
    for source in ("Pipeline(" * 80 + ")" * 80, "m" + ".fit(X)" * 300, "x = " + "+".join(["a.b"] * 500)):
        instrument("from sklearn.pipeline import Pipeline\n" + source, NONCE)
    assert time.monotonic() - started < 5


# Programs that run: fakes that note what was really carried out.
FAKES = '''
LOG = []
class SVC:
    def __init__(self): LOG.append("defined_model")
    def fit(self, X, y):
        if X == 0: raise ValueError("no rows")
        LOG.append("trained"); return self
    def predict(self, X): LOG.append("predicted"); return [X]
class pd:
    @staticmethod
    def read_csv(path):
        if "missing" in path: raise FileNotFoundError(path)
        LOG.append("loaded_data"); return 1
class out:
    @staticmethod
    def to_csv(path): LOG.append("wrote_submission")
'''  # fmt: skip
SIMPLE = st.sampled_from(
    [
        "x = pd.read_csv('train.csv')", "x = pd.read_csv('missing.csv')", "model = SVC()", "model.fit(1, 2)",
        "model.fit(0, 2)", "p = model.predict(3)", "out.to_csv('submission.csv')", "p = SVC().fit(1, 1).predict(x)",
        "pass", "print('é', end='')", "x = c and model.fit(1, 2)", "c = not c", "model.fit(1,\n2)",
        "q = model.predict(1) if c else 0", "f = lambda: model.fit(1, 2)", "f()", "x = 1; model.fit(1, x); y = x",
        "# a comment", "", "g = (SVC() for _ in 'ab')", "h = [SVC() for _ in 'ab']", "print = None", "print = len",
    ]
)  # fmt: skip


def indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join([*lines, "pass"]), "    ")


def compound(block):
    return st.one_of(
        st.builds("if c:\n{}\nelse:\n{}".format, block, block),
        st.builds("for i in range(2):\n{}".format, block),
        st.builds("for i in [pd.read_csv('a.csv')]:\n{}".format, block),
        st.builds("try:\n{}\nexcept Exception as error:\n{}".format, block, block),
        st.builds("with suppress(ValueError):\n{}".format, block),
        st.builds("if SVC().fit(1, 2):\n{}\nelif SVC().predict(1):\n{}".format, block, block),
        st.builds("while model.predict(1) and c:\n{}\n    c = False".format, block),
        st.builds("def f():\n{}\n    return SVC().fit(1, 2)\nf()".format, block),
        st.builds("class C:\n    '''Doc.'''\n{}".format, block),
    )


STATEMENTS = st.recursive(
    st.lists(SIMPLE, max_size=4), lambda inner: st.lists(st.one_of(SIMPLE, compound(inner.map(indented))), max_size=4)
)


def execute(source: str) -> tuple[list[str], list[str], list[str]]:
    """(what was carried out, milestones printed, other lines of output), the traceback's lines among the last."""
    stdout = io.StringIO()
    space = {"model": None, "c": True, "x": 1, "f": len, "suppress": contextlib.suppress}
    real, sys.__stdout__ = sys.__stdout__, stdout  # type: ignore[misc]
    try:
        with contextlib.redirect_stdout(stdout):
            exec(FAKES, space)
            space["model"] = space["SVC"]()
            space["LOG"].clear()
            try:
                exec(compile(source, "program.py", "exec"), space)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                stdout.write(
                    f"\n{type(error).__name__}: {error} line {last.lineno if last.filename == 'program.py' else 0}"
                )
    finally:
        sys.__stdout__ = real  # type: ignore[misc]
    marks, rest = [], []
    for line in stdout.getvalue().split("\n"):
        head, at, tail = line.partition("@@")
        name = parse_marker(at + tail, NONCE)
        marks += [name] if name else []
        rest.append(head if name else line)
    return space["LOG"], marks, ["".join(rest)]


@settings(max_examples=80, deadline=None)
@given(STATEMENTS)
def test_generated_programs_do_what_they_did_and_no_milestone_is_claimed_for_nothing(lines):
    source = "\n".join(lines)
    result = instrument(source, NONCE)
    assert result.refused == ""
    assert verify(source, result.source, NONCE)
    assert strip(result.source, NONCE).rstrip("\n") == source.rstrip("\n")
    before, none, output = execute(source)
    after, marks, same_output = execute(result.source)
    assert (none, before, output) == ([], after, same_output)
    assert set(marks) <= set(after)


RAISE = ("x = pd.read_csv", "model.fit", "f", "print", "print = None", "print = len")  # with some argument, or later


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(SIMPLE.filter(lambda line: not set(RAISE) & set(line.split("("))), max_size=6), max_size=3))
def test_straight_line_programs_claim_all_that_they_did(blocks):
    source = "\n".join("if True:\n" + indented(block) for block in blocks)
    _, marks, _ = execute(instrument(source, NONCE).source)
    unconditional = {"model = SVC": "defined_model", "out.to_csv": "wrote_submission"}
    done = {name for text, name in unconditional.items() if text in source}
    assert done <= set(marks)


def test_lines_of_tracebacks_read_as_the_program_was_written():
    source = "import os\nx = 1\nmodel = None\nmodel.fit(x, x)\n"
    text = instrument(source, NONCE).source
    shown = f'  File "program.py", line 4, in <module>\n    {text.splitlines()[3]}\nAttributeError: no fit\n'
    assert strip(shown, NONCE) == shown.splitlines()[0] + "\n    model.fit(x, x)\nAttributeError: no fit\n"


def test_it_is_fast():
    source = PREFIX + "".join(
        f"df{i} = pd.read_csv('{i}.csv'); X{i} = df{i}[['a']]; m.fit(X{i}, y)\n" for i in range(60)
    )
    started = time.process_time()
    instrument(source, NONCE)
    assert time.process_time() - started < 1.0
