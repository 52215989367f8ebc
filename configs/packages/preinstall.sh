#!/bin/sh
# The service runs as this user. It stays when the package is removed, with its files.
set -e
getent group evenkeel >/dev/null || groupadd --system evenkeel
getent passwd evenkeel >/dev/null || useradd --system --gid evenkeel --no-create-home \
	--home-dir /var/lib/evenkeel --shell /usr/sbin/nologin evenkeel
