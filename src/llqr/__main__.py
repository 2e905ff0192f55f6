"""The command `llqr`, also `python -m llqr`: it needs the laboratory's packages, which the library does not."""

import signal
import sys


def main() -> None:
    """Run the laboratory's command line, or say how to install it."""
    try:
        from llqr.lab.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("llqr: interrupted.", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "llqr":
            raise
        print(f'llqr: the command line needs {error.name}: pip install ".[lab]" in a clone', file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit code is decided: Ctrl-C changes nothing any more


if __name__ == "__main__":
    main()
