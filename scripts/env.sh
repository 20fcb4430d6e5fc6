# shellcheck shell=bash
# Makes the Python environment .venv of this checkout ready, and puts it on PATH. Sourced by quickstart.sh, for what
# running needs, and by test.sh, which sets NEEDED=dev for what the checks need besides.
#
#   TUNE_OFFLOAD_UV=1          install with uv in place of pip
#   TUNE_OFFLOAD_TORCH=cpu     the CPU build of torch, whatever the machine has; or `cuda`, or the address of a package
#                              index with another build, such as https://download.pytorch.org/whl/rocm6.4
#   TUNE_OFFLOAD_VENV=DIR      where the environment goes (default: .venv in the checkout)
#   PYTHON=/path/to/python     the interpreter to make it from (default: the first one found that is new enough)
#
# A second run finds the environment ready and returns at once; an unfinished or outdated one is completed.
# Versions are those of constraints.txt.

set -euo pipefail

NEEDED=${NEEDED:-run}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${TUNE_OFFLOAD_VENV:-$ROOT/.venv}
PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '==> %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.10 or newer"
        command -v "$PYTHON"
        return
    fi
    for candidate in python3 python python3.12 python3.11 python3.13 python3.10; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.10 or newer found: install one, or name it with PYTHON=/path/to/python"
}

# Runs a command with its output in the log, which is shown only if it fails; meanwhile tells how far it is.
logged() {
    local status=0 watcher
    printf '\n$ %s\n' "$*" >>"$LOG"
    watch_log &
    watcher=$!
    "$@" >>"$LOG" 2>&1 || status=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    [ ! -t 1 ] || printf '\r\033[K'
    return "$status"
}

# The time and the log's last line: live on a terminal, every 15 seconds elsewhere. Ends with the script.
watch_log() {
    local begin=$SECONDS spent line every=15
    [ ! -t 1 ] || every=1
    while kill -0 $$ 2>/dev/null; do
        sleep "$every" >/dev/null 2>&1
        spent=$((SECONDS - begin))
        line=$(tail -n 1 "$LOG" | tr -d '\r' | sed 's/^ *//' | cut -c 1-$((${COLUMNS:-80} - 14)))
        if [ -t 1 ]; then
            printf '\r\033[K    %4d s  %s' "$spent" "$line"
        else
            printf '    %4d s  %s\n' "$spent" "$line"
        fi
    done
}

failed() {
    tail -n 15 "$LOG" >&2
    die "$* (the whole output: $LOG)"
}

pip_setting() { "$VENV/bin/python" -m pip config get "global.$1" 2>/dev/null || true; }

# uv does not read pip's configuration: what that says about where packages are has to be passed on.
adopt_pip_settings() {
    local links index
    links=${PIP_FIND_LINKS:-$(pip_setting find-links)}
    index=${PIP_INDEX_URL:-$(pip_setting index-url)}
    if [ -n "$links" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
        # pip separates by blanks or new lines, uv by commas.
        UV_FIND_LINKS=$(printf '%s' "$links" | tr -s '[:space:]' ',')
        export UV_FIND_LINKS
    fi
    if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
        export UV_DEFAULT_INDEX=$index
    fi
}

# Installs into the environment: the arguments are those of `pip install`, which uv takes too.
install() {
    if [ "$INSTALLER" = uv ]; then
        logged uv pip install --python "$VENV/bin/python" "$@"
    else
        logged "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"
    fi
}

has_nvidia_gpu() {
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        return 0
    fi
    [ -e /dev/nvidia0 ] || [ -e /proc/driver/nvidia/version ]
}

# The interpreter behind an interpreter, so that an environment can be compared with what it was made from.
base_of() { "$1" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))' 2>/dev/null; }

make_venv() {
    local python clear
    if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV" 2>/dev/null)" ]; then
        die "$VENV exists and is not a Python environment: move it away, or set TUNE_OFFLOAD_VENV to another folder"
    fi
    python=$(find_python) || exit 1
    say "making the environment $VENV with $("$python" --version 2>&1) and $INSTALLER"
    if [ "$INSTALLER" = uv ]; then
        clear=$([ -e "$VENV" ] && echo --clear || true)
        # With pip seeded, the installer can be changed later.
        # shellcheck disable=SC2086
        uv venv --quiet --seed $clear --python "$python" "$VENV" || die "uv could not make $VENV"
    else
        "$python" -m venv --clear "$VENV" >/dev/null 2>&1 ||
            die "$python -m venv failed: install it (Debian, Ubuntu: apt install python3-venv), or use uv: TUNE_OFFLOAD_UV=1"
    fi
}

install_torch() {
    local version
    version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$ROOT/constraints.txt")
    case $TORCH in
    cpu)
        if [ "$(uname -s)" != Linux ]; then
            return # elsewhere the package index has CPU builds
        fi
        if "$VENV/bin/python" -c "import sys, importlib.metadata as m; sys.exit(m.version('torch') != '$version+cpu')" 2>/dev/null; then
            return
        fi
        say "installing torch $version for CPU (about 200 MB; no NVIDIA GPU found)"
        # First from wherever pip was configured to look; what is not there is asked of PyTorch's own index.
        install --no-deps "torch==$version+cpu" ||
            install --no-deps --index-url "$PYTORCH_CPU_INDEX" "torch==$version+cpu" ||
            say "no CPU build found: taking the package index's, which carries CUDA (about 3 GB)"
        ;;
    cuda)
        say "installing torch $version with CUDA (about 3 GB: several minutes)"
        install "torch==$version" || failed "could not install torch $version"
        ;;
    *)
        say "installing torch $version from $TORCH"
        install --no-deps --index-url "$TORCH" "torch==$version" || failed "could not install torch $version from $TORCH"
        ;;
    esac
}

prepare() {
    INSTALLER=pip
    if [ "${TUNE_OFFLOAD_UV:-0}" = 1 ]; then
        command -v uv >/dev/null || die "TUNE_OFFLOAD_UV=1, but there is no uv on PATH: pip install uv, or leave it out"
        INSTALLER=uv
    fi
    TORCH=${TUNE_OFFLOAD_TORCH:-$(has_nvidia_gpu && echo cuda || echo cpu)}
    case $TORCH in
    cpu | cuda | http://* | https://* | file://*) ;;
    *) die "TUNE_OFFLOAD_TORCH=$TORCH: expected cpu, cuda or the address of a package index" ;;
    esac

    if [ -n "${PYTHON:-}" ] && [ -x "$VENV/bin/python" ] && [ "$(base_of "$(find_python)")" != "$(base_of "$VENV/bin/python")" ]; then
        die "$VENV was made from another Python than PYTHON=$PYTHON: remove it, or set TUNE_OFFLOAD_VENV to another folder"
    fi

    local stamp wanted started extras=
    stamp=$VENV/.tune-offload-ready
    # Whatever changes what would be installed; the folder, because scripts in an environment hold absolute paths.
    wanted="$ROOT $VENV $INSTALLER $TORCH $(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/tune_offload.pth" | cksum)"
    # What the checks need holds what running needs.
    if [ -f "$stamp" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
        case $(cat "$stamp") in
        "$NEEDED $wanted" | "dev $wanted") return ;;
        esac
    fi

    started=$SECONDS
    # Also after a move of the folder, an upgrade of the interpreter, or an interruption in the middle.
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
        ! grep -qsF "$VENV" "$VENV/bin/activate"; then
        make_venv
    fi
    rm -f "$stamp"
    LOG=$VENV/install.log
    : >"$LOG"
    if [ "$INSTALLER" = uv ]; then
        adopt_pip_settings
    fi
    install_torch
    if [ "$NEEDED" = dev ]; then
        extras='[dev]'
        say "installing tune-offload, what it needs and what its checks need, with $INSTALLER (two to four minutes)"
    else
        say "installing tune-offload and what it needs, with $INSTALLER (one to two minutes)"
    fi
    (cd "$ROOT" && install -c constraints.txt -e ".$extras") || failed "could not install tune-offload"
    if [ "$TORCH" = cuda ] && ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        say "warning: torch sees no CUDA device (a driver too old for this build?): training will run on the CPU." \
            "TUNE_OFFLOAD_TORCH=https://download.pytorch.org/whl/cu126 takes a build for older drivers"
    fi
    printf '%s' "$NEEDED $wanted" >"$stamp"
    say "ready after $((SECONDS - started)) s; log in $LOG"
}

prepare
# After a change of its sources: an installation in place compiles it once.
"$VENV/bin/python" "$ROOT/hatch_build.py" >/dev/null ||
    say "the CPU kernel of offload.optim was not compiled: updates on the CPU take PyTorch's operations, and longer"
export VIRTUAL_ENV=$VENV
export PATH=$VENV/bin:$PATH
unset PYTHONHOME
