#!/usr/bin/env bash
# Install what a local cluster needs, if it is missing: Debian's or Ubuntu's packages, and only as root; otherwise say what is missing.
#   install.sh --suite trixie: that Debian release's SLURM into a folder of its own, for enter.sh; this system stays as it is.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
. "$HERE/suite.sh"

if [[ ${1:-} == --suite ]]; then
    check_suite "${2:-}"
    build_suite "$2"
    exit
fi
needed=(munged slurmctld slurmd slurmdbd sacctmgr mariadbd)
((ISOLATE)) && needed+=(ip nsenter unshare)

missing=()
for program in "${needed[@]}"; do
    command -v "$program" >/dev/null || missing+=("$program")
done
((${#missing[@]} == 0)) && exit 0

if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    fail "missing: ${missing[*]}. Install these packages (names as in Debian and Ubuntu), which needs root: $PACKAGES"
fi
say "installing SLURM: missing ${missing[*]}"
# shellcheck disable=SC2086
install_packages $PACKAGES
