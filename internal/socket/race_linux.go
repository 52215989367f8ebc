//go:build race

package socket

import "syscall"

// The race detector takes what is written to a socket to happen before what is read from one. It learns that
// from package syscall, which raw calls pass by.

func written() { _, _ = syscall.Write(-1, nil) } // the write fails, and has been seen

func received(fd uintptr) { _, _ = syscall.Read(int(fd), nil) } // nothing is read
