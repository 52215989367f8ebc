//go:build !linux

package main

import (
	"fmt"
	"runtime"
)

func newNamespaces(options) (ground, error) {
	return nil, fmt.Errorf("%w: %s is not Linux", errForbidden, runtime.GOOS)
}
