package main

import (
	"github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"
)

// notifySystemd reports a state of serve to systemd. It does nothing unless systemd started the
// program as a unit with Type=notify.
func notifySystemd(log *zap.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("the service manager wants to know the proxy's state, and cannot be reached", zap.String("state", state), zap.Error(err))
	}
}
