package main

import (
	"github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"
)

// tell lets systemd know what becomes of serve, where it asked to be told
// (Type=notify of the unit); elsewhere it does nothing.
func tell(log *zap.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("the service manager wants to know the proxy's state, and cannot be reached", zap.String("state", state), zap.Error(err))
	}
}
