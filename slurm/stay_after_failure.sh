# Goes into every job's script behind wait_for_run_folder.sh; STAY_S is set above. What ends within seconds has not come to its own code (a file system
# or a module that this node lacks): the array's next element would begin here at once and fail alike, until none is left. So it stays for a while.
headway_stay() {
    [ "$1" -ne 0 ] && [ $((SECONDS - headway_began)) -lt 20 ] || return 0
    echo "ended within seconds, with status $1: this element stays for $STAY_S s, so that a bad node does not use up the array"
    headway_began=$SECONDS
    until [ $((SECONDS - headway_began)) -ge "$STAY_S" ] || [ -e "$RUN/outcome.json" ] || [ -e "$RUN/stop" ]; do sleep 1; done
}
headway_began=$SECONDS
trap 'headway_stay $?' EXIT
