# Sourced by the scripts beside it: makes the checkout's own environment in .venv, once, and
# installs again only when pyproject.toml, the constraints or the interpreter changed.
# Sets ROOT (the checkout) and puts the environment's commands first on PATH.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

_find_python() {
    local candidate
    # A name may be there and still not run (a version manager's stand-in), so each one is tried.
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            # Inside an activated environment this is the interpreter that the environment was made from.
            "$candidate" -c 'import os, sys
print(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))'
            return 0
        fi
    done
    echo "error: no Python 3.11 or newer found as python3, python3.13, python3.12 or python3.11;" \
        "install one and put it on PATH" >&2
    return 1
}

_stamp() {
    # The checkout's path counts: the editable install points at it.
    {
        printf '%s\n%s\n' "$ROOT" "$1"
        cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt"
    } | cksum
}

_install() {
    local python="$1" venv="$ROOT/.venv"
    echo "Installing piper-owner and its tools into $venv (once, a few minutes) ..."
    rm -rf "$venv"
    if ! "$python" -m venv "$venv"; then
        echo "error: $python cannot make a virtual environment; on Debian and Ubuntu its venv module" \
            "is a package of its own (python3-venv)" >&2
        return 1
    fi
    # hatchling comes first and the build is not isolated, so that the constraints hold for it too.
    "$venv/bin/python" -m pip install -qq --constraint "$ROOT/scripts/constraints.txt" hatchling ||
        return 1
    "$venv/bin/python" -m pip install -qq --constraint "$ROOT/scripts/constraints.txt" \
        --no-build-isolation --editable "$ROOT[dev,hf]" || return 1
}

_ensure_environment() {
    local python stamp file="$ROOT/.venv/.installed-for"
    python="$(_find_python)" || return 1
    stamp="$(_stamp "$python")"
    if [[ -f "$file" && "$(cat "$file")" == "$stamp" ]] && "$ROOT/.venv/bin/python" -c '' 2>/dev/null; then
        return 0
    fi
    _install "$python" || return 1
    printf '%s\n' "$stamp" >"$file"
}

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Two scripts at once: the second waits until the first has installed (where flock exists).
if command -v flock >/dev/null 2>&1; then
    exec 9>"$ROOT/.venv.lock"
    flock 9
    _ensure_environment
    exec 9>&-
else
    _ensure_environment
fi
export VIRTUAL_ENV="$ROOT/.venv" PATH="$ROOT/.venv/bin:$PATH"
