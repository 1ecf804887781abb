# Starts one daemon inside a machine of the test cluster (machine.py): cgroups, log, report, then becomes the program.
set -eu
exec </dev/null >>"$LOG_FILE" 2>&1
for group in $CGROUPS; do echo 0 >"$group/cgroup.procs"; done
read -r pid rest </run/machine-proc/self/stat
echo "$pid" >"$PID_FILE"
unset CGROUPS LOG_FILE PID_FILE
exec "$@"
