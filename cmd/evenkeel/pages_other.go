//go:build !linux

package main

// forgetProgram leaves the program's pages to the system.
func forgetProgram() error { return nil }
