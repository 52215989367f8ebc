//go:build race

package socket

import "syscall"

// The race detector assumes that a write to a socket happens before a read from one. It learns of
// these from package syscall, which raw calls bypass.

// The write to an invalid descriptor fails, but the detector has noted it.
func raceNoteWrite() { _, _ = syscall.Write(-1, nil) }

// the buffer is empty, so nothing is read
func raceNoteRead(fd uintptr) { _, _ = syscall.Read(int(fd), nil) }
