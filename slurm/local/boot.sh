#!/usr/bin/env bash
# boot.sh STATE NAME GROUP: process 1 of a node, inside its namespaces. Ends only with the node.
STATE=$1 NAME=$2 GROUP=$3
hostname "$NAME"
echo "$NAME" >"$STATE/nodes/$NAME/hostname"
mount --bind "$STATE/nodes/$NAME/hostname" /etc/hostname
mount --bind "$STATE/etc/hosts" /etc/hosts
mount --bind "$STATE/etc/resolv.conf" /etc/resolv.conf
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs /dev/shm
for controller in freezer memory; do
    [[ -d /sys/fs/cgroup/$controller/$GROUP ]] && mount --bind "/sys/fs/cgroup/$controller/$GROUP" "/sys/fs/cgroup/$controller"
done
# -b: for SLURM too, the machine has booted just now, and the jobs it had are lost.
slurmd -D -b -f "$STATE/etc/slurm.conf" -N "$NAME" &
wait $!
