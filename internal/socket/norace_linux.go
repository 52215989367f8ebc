//go:build !race

package socket

// Without the race detector, these functions do nothing. race_linux.go says what they tell the
// detector.

func raceNoteWrite() {}

func raceNoteRead(uintptr) {}
