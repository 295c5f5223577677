"""Stand for a Python process forked by `warm_server`: its arguments, environment, files, signals
and status.

PROGRAM, next to the server's socket, starts this. It becomes the process's `sys.executable`, so
children of a launcher are forked as well.

    python -IS warm_client.py PROGRAM [-u] (SCRIPT | -m MODULE | -c CODE) [argument …]
"""

import json
import os
import signal
import socket
import sys


def main(program: str, *arguments: str) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(os.path.dirname(program), "socket"))
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        stream = connection.makefile("rw")
        request = {
            "program": program,
            "arguments": arguments,
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
        }
        print(json.dumps(request), file=stream, flush=True)
        process = int(stream.readline())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: os.kill(process, number))
        status = int(stream.readline())
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
