"""`python -m storage ...`: serve the lab; list, show, stop and delete runs without a browser.

`serve` supervises two processes, the scheduler and the web server, and restarts either when it dies. Training processes
belong to neither: they go on when the lab ends and are found again when it starts.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError

from comet_core.config import check_system
from comet_core.launcher import PROJECT
from comet_core.metrics import dumps
from storage import database, runs

BACK_OFF_SECONDS = (1, 2, 5, 15, 30)
HEALTHY_SECONDS = 60  # a process that lived this long starts the back-off anew
END_SECONDS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m storage", description="The lab and its runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve_options = commands.add_parser("serve", help="start the lab: scheduler and web pages")
    serve_options.add_argument("--port", type=int, help="of the web pages; else PORT, else 8501")
    serve_options.add_argument("--host", help="address to listen on; else COMET_HOST, else 127.0.0.1")
    scheduler_options = commands.add_parser("scheduler", help="start the scheduler alone")
    for options in (serve_options, scheduler_options):
        options.add_argument("--slots", type=int, help="runs that train at the same time; else COMET_SLOTS, else 1")
    texts = {"list": "the newest runs", "show": "one run", "stop": "stop a run", "delete": "delete a run"}
    for name, text in texts.items():
        options = commands.add_parser(name, help=text)
        if name == "list":
            options.add_argument("--limit", type=int, default=50, help="how many at most (default 50)")
        else:
            options.add_argument("id", type=int, help="number of the run")
        options.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        check_system()
        match given.command:
            case "serve":
                return serve(
                    _number("--port", given.port, "PORT", 8501),
                    given.host or os.environ.get("COMET_HOST") or "127.0.0.1",
                    _number("--slots", given.slots, "COMET_SLOTS", 1),
                )
            case "scheduler":
                from storage import scheduler

                scheduler.run(_number("--slots", given.slots, "COMET_SLOTS", 1))
            case "list":
                _list(given.limit, given.json)
            case "show":
                _show(given.id, given.json)
            case "stop":
                status = runs.request_stop(given.id)
                print(dumps({"id": given.id, "status": status}) if given.json else f"Run {given.id} is {status}.")
            case "delete":
                runs.delete_run(given.id)
                print(dumps({"id": given.id, "deleted": True}) if given.json else f"Run {given.id} is deleted.")
    except (ValueError, RuntimeError, ModuleNotFoundError, OSError, SQLAlchemyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def serve(port: int, host: str, slots: int) -> int:
    """Keep scheduler and web server going until a signal ends it. Raises ValueError where the port is taken."""
    _check_port(host, port)
    database.engine().dispose()  # a database that cannot be used is said here, once
    commands = {
        "scheduler": ["-m", "storage", "scheduler"],
        "web": ["-m", "streamlit", "run", "app.py", "--server.port", str(port), "--server.address", host,
                "--server.headless", "true", "--browser.gatherUsageStats", "false"],
    }  # fmt: skip
    os.environ["COMET_SLOTS"] = str(slots)  # for both: the scheduler keeps to it, a page shows it
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    print(f"COMET Lab: http://{host}:{port}  (Ctrl-C ends it)", file=sys.stderr, flush=True)
    watchers = [threading.Thread(target=_keep_going, args=(name, command, stop)) for name, command in commands.items()]
    for watcher in watchers:
        watcher.start()
    stop.wait()
    for watcher in watchers:
        watcher.join()
    live = len(runs.live_runs())
    if live:
        print(f"{live} training goes on; the lab finds it again when it starts." if live == 1 else
              f"{live} trainings go on; the lab finds them again when it starts.", file=sys.stderr)  # fmt: skip
    return 0


def _keep_going(name: str, command: Sequence[str], stop: threading.Event) -> None:
    failures = 0
    while not stop.is_set():
        # a group of its own, so that Ctrl-C in a terminal reaches `serve` alone, which then ends both in order
        process = subprocess.Popen([sys.executable, *command], cwd=PROJECT, process_group=0)
        started = time.monotonic()
        while process.poll() is None and not stop.wait(0.2):
            pass
        if stop.is_set():
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return
        failures = 0 if time.monotonic() - started > HEALTHY_SECONDS else failures
        delay = BACK_OFF_SECONDS[min(failures, len(BACK_OFF_SECONDS) - 1)]
        failures += 1
        print(f"{name} ended with code {process.returncode}; again in {delay} s", file=sys.stderr, flush=True)
        stop.wait(delay)


def _check_port(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise ValueError(f"port is {port}; allowed: a whole number from 1 to 65,535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"Port {port} on {host} cannot be used ({error.strerror}): end what listens there, "
                "or choose another one: make run PORT=8502."
            ) from None


def _number(option: str, given: int | None, variable: str, default: int) -> int:
    if given is not None:
        return given
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal():
        raise ValueError(f"{variable} is {text!r}; write a whole number, or use {option}.")
    return int(text)


def _list(limit: int, as_json: bool) -> None:
    from storage import queries

    found = [queries.run(run_id) or {} for run_id in queries.runs_frame(limit=limit)["id"].tolist()]
    if as_json:
        print(dumps(found))
        return
    for run in found:
        accuracy = run["last_test_accuracy"]
        shown = "" if accuracy is None else f"{accuracy:.2%}"
        print(f"{run['id']:>6}  {run['status']:<9}  {shown:>7}  {run['name']}")


def _show(run_id: int, as_json: bool) -> None:
    from storage import queries

    found = queries.run(run_id)
    if found is None:
        raise runs.RunStateError(f"There is no run {run_id}.")
    if as_json:
        print(dumps(found))
        return
    for name, value in found.items():
        if value is not None:
            print(f"{name}: {value}")


if __name__ == "__main__":
    sys.exit(main())
