#!/usr/bin/env bash
# Runs `go build -v` and says how many packages it has compiled: bench/tools/ci/counted.sh NUMBER COMMAND...
# NUMBER is how many there are at most: go names no package that an earlier run has compiled.
set -euo pipefail
all=$1
shift
"$@" 2>&1 | {
	compiled=0
	while IFS= read -r line; do
		if [[ ! $line =~ ^[^\ :#]+$ ]]; then # no package: what go has to say
			printf '%s\n' "$line"
			continue
		fi
		compiled=$((compiled + 1))
		if [ -t 1 ]; then
			printf '\r%d of %d packages compiled, %d s' $compiled "$all" $SECONDS
		elif ((compiled % 100 == 0)); then
			printf '%d of %d packages compiled, %d s\n' $compiled "$all" $SECONDS
		fi
	done
	if [ -t 1 ] && ((compiled)); then echo; fi
}
