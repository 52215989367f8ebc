package main

import "evenkeel/gateway/keys"

type keysCmd struct {
	New keysNewCmd `cmd:"" help:"Make a key, and print it with its entry for keys_file."`
}

type keysNewCmd struct {
	Name    string `required:"" help:"Name the caller. Logs and metrics show this name."`
	Trusted bool   `help:"Let the caller send x-evenkeel-* headers."`
}

// Run prints a new key with its entry for keys_file.
func (c *keysNewCmd) Run(std streams) error { return keys.WriteNew(std.out, c.Name, c.Trusted) }
