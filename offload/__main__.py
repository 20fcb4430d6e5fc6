"""``python -m offload``: the ``tune`` command under a name that nothing else can take."""

from offload.cli.main import script

if __name__ == "__main__":
    script()
