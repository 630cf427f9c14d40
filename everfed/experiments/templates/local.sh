#!/bin/bash
# @WORKERS@ identical workers on this machine; each takes runs of the table that no other has.
cd @HERE@ || exit 1
workers=()
for worker in $(seq @WORKERS@); do
    @COMMAND@ >>@LOGS@/worker-"$worker".out 2>&1 &
    workers+=($!)
done
code=0
for worker in "${workers[@]}"; do wait "$worker" || code=$?; done
exit $code
