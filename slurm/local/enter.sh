#!/usr/bin/env bash
# enter.sh SUITE COMMAND..: run a command where install.sh --suite SUITE has put that Debian release's SLURM; as root. It sees this checkout, the Pythons of
# its environments, /tmp, and this machine's network and devices. Its mounts are its own, and end with the last process that it leaves behind.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
. "$HERE/suite.sh"

if [[ ${INSIDE:-} != 1 ]]; then
    check_suite "${1:-}"
    [[ -d $SUITE_ROOTS/$1 ]] || fail "$SUITE_ROOTS/$1 is not there: slurm/local/install.sh --suite $1 first"
    (($# > 1)) || fail "enter.sh SUITE COMMAND..: run what?"
    INSIDE=1 exec unshare --mount --propagation private "$0" "$@"
fi
root=$SUITE_ROOTS/$1 checkout=$(realpath "$HERE/../..")
shift
show() { # PATH [OPTION]: the same path inside
    [[ -d $1 ]] && mkdir -p "$root$1" || touch "$root$1"
    mount --bind "$1" "$root$1"
    [[ -z ${2:-} ]] || mount -o "remount,bind,$2" "$root$1"
}
mount --bind "$root" "$root" # a mount: ip netns wants one to be /
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
for path in /tmp /etc/hosts /etc/hostname /etc/resolv.conf "$checkout"; do show "$path"; done
for python in "$checkout"/.venv*/bin/python; do
    [[ -e $python ]] || continue
    prefix=$(dirname "$(dirname "$(realpath "$python")")")
    [[ $prefix != /usr ]] || fail "$python is this system's own, and does not run in another release: make .venv with one that stands elsewhere (pyenv, uv)"
    show "$prefix" ro
done
unset INSIDE
folder=$PWD
[[ $folder == "$checkout"* || $folder == /tmp* ]] || folder=$checkout
# shellcheck disable=SC2016
exec chroot "$root" env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 bash -c 'cd "$1" && shift && exec "$@"' _ "$folder" "$@"
