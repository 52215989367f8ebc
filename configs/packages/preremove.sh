#!/bin/sh
# The service ends when the package is removed, and not when it is upgraded: dpkg then
# says "upgrade", rpm that one version stays.
set -e
case "$1" in
remove | 0) if [ -d /run/systemd/system ]; then systemctl disable --now evenkeel; fi ;;
esac
