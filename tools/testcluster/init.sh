# PID 1 of a machine of the test cluster (machine.py starts it, already in its namespaces).
# Moves itself into the machine's cgroups, gives the machine its own /run, /proc and disk, and then only reaps.
set -eu
exec >"$LOG_FILE" 2>&1
for group in $CGROUPS; do echo 0 >"$group/cgroup.procs"; done
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/machine-proc /run/netns /run/lock
mount --rbind /proc /run/machine-proc
mount -t proc proc /proc
if [ -n "${DISK:-}" ]; then
	mount -o loop,noatime "$DISK" /var/lib
	mkdir -p /var/lib/kubelet /var/lib/containerd /var/lib/cni /var/lib/log
	mount --bind /var/lib/log /var/log
fi
# The kubelet wants propagation below /; it ends at this namespace, which is private to the machine.
mount --make-rshared /
hostname "$MACHINE"
ip link set lo up
# The shell's own pid as the whole machine sees it: /proc of the outer pid namespace tells it.
read -r pid rest </run/machine-proc/self/stat
echo "$pid" >"$PID_FILE"
while :; do
	sleep infinity &
	wait $! || true
done
