//go:build !linux

package main

// forgetProgram does nothing on this system.
func forgetProgram() error { return nil }
