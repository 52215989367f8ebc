//go:build race

package socket

import "syscall"

// The race detector assumes that a write to a socket happens before a read from one. It learns of reads and writes from package
// syscall, which raw calls bypass. These functions make calls of package syscall only to inform the detector.

// raceNoteWrite tells the race detector that a socket was written. The write to an invalid descriptor fails, but the detector has noted it.
func raceNoteWrite() { _, _ = syscall.Write(-1, nil) }

// raceNoteRead tells the race detector that a socket was read.
func raceNoteRead(fd uintptr) { _, _ = syscall.Read(int(fd), nil) } // the buffer is empty, so nothing is read
