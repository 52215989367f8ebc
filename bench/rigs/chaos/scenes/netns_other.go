//go:build !linux

package scenes

import (
	"fmt"
	"runtime"
)

func newNamespaces(options) (ground, error) {
	return nil, fmt.Errorf("%w: %s is not Linux", errForbidden, runtime.GOOS)
}
