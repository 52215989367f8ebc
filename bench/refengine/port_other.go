//go:build !linux

package refengine

import "os"

// reservePort leaves the choice to the listener: here nothing can hold a port
// for it, and that of a killed engine may be another's when it is revived.
func reservePort(addr string) (string, *os.File, error) { return addr, nil, nil }
