//go:build !race

package socket

// Without the race detector, these functions do nothing; see race_linux.go.

func raceNoteWrite() {}

func raceNoteRead(uintptr) {}
