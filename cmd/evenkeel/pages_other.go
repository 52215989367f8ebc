//go:build !linux

package main

// dropProgramPages does nothing outside Linux. Memory that only the start needed then stays in use.
func dropProgramPages() error { return nil }
