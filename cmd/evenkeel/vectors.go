package main

import (
	"evenkeel/bench/lab/vectors"
)

type vectorsCmd struct {
	Paths []string `arg:"" name:"path" help:"Run these vector files, or folders of *.jsonl."`
}

// Run runs the golden vectors. It fails if any vector has another outcome than recorded, or is of
// an unknown kind.
func (c *vectorsCmd) Run(std streams) error {
	_, failed, err := vectors.Run(c.Paths, std.out)
	if err != nil {
		return err
	}
	if failed > 0 {
		return errFailed
	}
	return nil
}
