# shellcheck shell=bash
# Sourced after settings.sh: the packages of a local cluster, for this system or, as another Debian release has them, in a folder of their own (enter.sh).

PACKAGES="slurmctld slurmd slurm-client slurmdbd munge mariadb-server-core iproute2"
SUITES="bookworm trixie forky" # SLURM 22.05, 24.11, 26.05
SUITE_ROOTS=${HEADWAY_SLURM_SUITES:-/var/tmp/headway-slurm-suites}

install_packages() { # NAME..: into this system; their services are not started
    export DEBIAN_FRONTEND=noninteractive
    local policy=/usr/sbin/policy-rc.d status=0
    [[ -e $policy ]] && policy=
    [[ -z $policy ]] || { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"; }
    apt-get install -qq -y --no-install-recommends "$@" >&2 || {
        apt-get update -qq >&2
        apt-get install -qq -y --no-install-recommends "$@" >&2 || status=1
    }
    [[ -z $policy ]] || rm -f "$policy"
    return "$status"
}

check_suite() { # SUITE
    [[ -n $1 && " $SUITES " == *" $1 "* ]] || fail "no suite '$1': use one of $SUITES"
    ((EUID == 0)) || fail "a folder with another Debian release ($1) needs root"
}

build_suite() { # SUITE: 300-480 MB, two minutes
    local root=$SUITE_ROOTS/$1 libraries=libreadline8t64,libssl3t64
    [[ -e $root ]] && return
    command -v mmdebstrap >/dev/null || install_packages mmdebstrap || fail "missing: mmdebstrap, the package of that name"
    say "installing Debian $1's SLURM into $root"
    mkdir -p "$SUITE_ROOTS"
    # Besides SLURM the libraries of a Python from outside. A mirror that lags serves as well: testing's index expires within a week, its signature holds.
    [[ $1 == bookworm ]] && libraries=libreadline8,libssl3
    mmdebstrap --quiet --variant=minbase --aptopt='Acquire::Check-Valid-Until "false"' \
        --include="${PACKAGES// /,},procps,ca-certificates,python3,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,libncursesw6,libgomp1,libstdc++6,$libraries" \
        "$1" "$root.$$" ${MIRROR:+"$MIRROR"} >&2 || { rm -rf "$root.$$"; fail "Debian $1 could not be installed"; }
    mv "$root.$$" "$root"
}
