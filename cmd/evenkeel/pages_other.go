//go:build !linux

package main

// dropProgramPages does nothing on this system.
func dropProgramPages() error { return nil }
