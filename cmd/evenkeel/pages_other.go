//go:build !linux

package main

// dropProgramPages does nothing on this system.
func forgetProgram() error { return nil }
