#!/bin/sh
# The service ends when the package is removed, after its running requests, and not when the package is
# upgraded: dpkg then says "upgrade", rpm that one version stays. Where systemd does not run, as in a
# folder that becomes an image, only the link of `systemctl enable` goes.
set -e
case "$1" in
remove | 0)
	if [ -d /run/systemd/system ]; then
		systemctl disable --now evenkeel
	elif command -v systemctl >/dev/null; then
		systemctl disable evenkeel
	fi
	;;
esac
