# Goes into every job's script before anything else (launcher/jobs/sbatch_script.py); RUN and LIMIT_S are set above it. A run folder may be full, or
# away while its file server fails over: an element that began then would fail in a second, and so would all that follow it. It waits instead,
# LIMIT_S at most. That is said in SLURM's comment, as this job's log lies in that folder, too. Then the run ends.
headway_usable() {
    [ -e "$RUN/outcome.json" ] || {
        head -c 65536 /dev/zero >"$RUN/jobs/.probe.$SLURM_JOB_ID" && cat "$RUN/config.json" >/dev/null && rm "$RUN/jobs/.probe.$SLURM_JOB_ID"
    } 2>/dev/null
}
headway_comment() { scontrol update JobId="$SLURM_JOB_ID" Comment="${1:+headway: $1}" || true; }
# Somebody trains, and does not say that it waits for the folder, too: this node alone lacks it.
headway_elsewhere() {
    squeue --me --noheader --states=RUNNING --format="%A %j %k" | grep -F " ${SLURM_JOB_NAME%-*-*}-train-" | grep -v "^$SLURM_JOB_ID " | grep -qv " headway: "
}
headway_give_up() {
    if headway_elsewhere; then
        headway_comment "$RUN was full or away for $LIMIT_S s on $(hostname) alone: the run goes on without this element"
        exit 1
    fi
    headway_comment "$RUN was full or away for $LIMIT_S s: the run has ended"
    rm -f "$RUN/reserve" "$RUN/jobs/.probe.$SLURM_JOB_ID"
    printf '{"state": "failed", "cause": "run.dir=%s: was full or away for %s s (run.outage_minutes)", "reported_by": "an element", "time": %s}' \
        "$RUN" "$LIMIT_S" "$(date +%s)" >"$RUN/.outcome.$SLURM_JOB_ID" && ln "$RUN/.outcome.$SLURM_JOB_ID" "$RUN/outcome.json"
    rm -f "$RUN/.outcome.$SLURM_JOB_ID"
    # All of the run: its arrays' names are RUN-TOKEN-ROLE-NUMBER.
    scancel $(squeue --me --noheader --format="%F %j" | grep -F " ${SLURM_JOB_NAME%-*-*}-" | cut -d" " -f1 | sort -u)
    exit 1
}
headway_told=
until headway_usable; do
    [ "$SECONDS" -lt "$LIMIT_S" ] || headway_give_up
    [ "$headway_told" ] || headway_comment "$RUN is full or away: waiting for it, $LIMIT_S s at most (run.outage_minutes)"
    headway_told=1
    sleep 3
done
[ -z "$headway_told" ] || headway_comment ""
exec >>"$RUN/jobs/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}_${SLURM_ARRAY_TASK_ID:-0}_0_log.out" 2>&1
