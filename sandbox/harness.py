"""What runs inside the box: seeds the generators, says that it is ready, becomes the program.

It is started as `python -P -s -u harness.py PROGRAM SEED [NPROC FD]` and imports nothing from the project, since it
is all of the project that a box can see. NPROC > 0 limits processes from inside, for hosts without a cgroup. FD >= 0
is a unix socket by which the host is handed the working directory, so that it can read it after the box is dead.
"""

from __future__ import annotations

import os
import random
import sys
import types

READY = b"@@ready\n"  # first line of the output: what comes before is the box's own start, what follows the program's


def main() -> None:
    path, seed = sys.argv[1], int(sys.argv[2])
    nproc, fd = map(int, sys.argv[3:5] or (0, -1))
    if nproc > 0:
        import resource

        resource.setrlimit(resource.RLIMIT_NPROC, (nproc, nproc))
    if fd >= 0:
        import _socket
        import array

        scratch = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        channel = _socket.socket(fileno=fd)
        channel.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [scratch]))])
        channel.close()
        os.close(scratch)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed % 2**32)

    # As `python program.py` would have it: argv, path, and a fresh __main__ that pickle and multiprocessing can find.
    path = os.path.abspath(path)
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    os.write(1, READY)
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # printed as Python itself would, without this file's frames
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


if __name__ == "__main__":
    main()
