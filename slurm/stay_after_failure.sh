# Goes into every job's script behind wait_for_run_folder.sh; STAY_S is set above. What ends within seconds and has not come to its own code
# (workers/entry.py) lacks a file system or a module on this node: the array's next element would begin here at once and fail alike, until none is
# left. So it stays for a while.
headway_stay() {
    [ "$1" -ne 0 ] && [ $((SECONDS - headway_began)) -lt 20 ] && [ ! -e "$RUN/jobs/.begun.$SLURM_JOB_ID" ] || { rm -f "$RUN/jobs/.begun.$SLURM_JOB_ID"; return 0; }
    echo "ended within seconds, with status $1: this element stays for $STAY_S s, so that a bad node does not use up the array"
    headway_began=$SECONDS
    until [ $((SECONDS - headway_began)) -ge "$STAY_S" ] || [ -e "$RUN/outcome.json" ] || [ -e "$RUN/stop" ]; do sleep 1; done
}
headway_began=$SECONDS
rm -f "$RUN/jobs/.begun.$SLURM_JOB_ID"  # of an earlier life of this job
trap 'headway_stay $?' EXIT
