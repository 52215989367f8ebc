//go:build !unix

package edge

import "go.uber.org/zap"

// RaiseFileLimit does nothing, because this system has no such limit.
func RaiseFileLimit(_ *zap.Logger, want uint64) (uint64, error) { return want, nil }
