#!/bin/sh
# systemd reads the unit. A running service is left alone: it drains for up to five
# minutes, and when is its operator's to say (systemctl restart evenkeel).
set -e
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
