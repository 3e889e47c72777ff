#!/bin/sh
# Install Debian or Ubuntu packages where this user may: install_packages.sh required|optional PACKAGE...
# Required ones that cannot be installed are an error; without optional ones some tests are skipped.
set -eu
need=$1
shift
if ! command -v apt-get >/dev/null; then
    problem="this is not Debian or Ubuntu; install yourself: $*"
elif [ "$(id -u)" = 0 ]; then
    problem=
    sudo=
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    problem=
    sudo="sudo -n"
else
    problem="run: sudo apt-get install $*"
fi
if [ -z "$problem" ]; then
    $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        problem="apt-get could not install $*"
fi
if [ -n "$problem" ]; then
    if [ "$need" = required ]; then
        echo "error: $problem" >&2
        exit 2
    fi
    echo "some tests will be skipped: $problem"
fi
