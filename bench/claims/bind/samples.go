package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/decode"
)

// cell is one run: an arm with prefills of a length, on the requests of a seed.
type cell struct {
	Trace    string  `json:"trace"`
	Ranks    int     `json:"ranks"`
	Slots    int     `json:"slots"`
	Load     string  `json:"load"`
	Seeds    int     `json:"seeds"` // that the trace is divided among
	Requests int     `json:"requests"`
	Steps    float64 `json:"steps"`
	Arm      string  `json:"arm"`
	Seed     int     `json:"seed"`
}

// metrics that are kept of a run.
var metrics = []report.Metric{
	report.IdleShare, report.TokensPerS, report.TPOTP95, report.TTFTP50, report.TTFTP99, report.StepMean, report.Steps, report.Preempted,
	report.Failed,
}

// samples are what the runs gave. They are written to a file as they come, and a run that is in the
// file is not run again: whoever ends the program loses one run.
type samples struct {
	of   map[cell]report.Sample
	file *os.File // nil: they are kept in memory only
}

type line struct {
	Cell   cell          `json:"cell"`
	Sample report.Sample `json:"sample"`
}

// openSamples reads the file, if there is one, and goes on at its end. Otherwise it makes the file
// and its folder.
func openSamples(path string) (*samples, error) {
	s := &samples{of: map[cell]report.Sample{}}
	if path == "" {
		return s, nil
	}
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	whole := bytes.LastIndexByte(text, '\n') + 1 // the last line may have been cut
	lines := bufio.NewScanner(bytes.NewReader(text[:whole]))
	for n := 1; lines.Scan(); n++ {
		var l line
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", path, n, err)
		}
		s.of[l.Cell] = l.Sample
	}
	if err = os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	if s.file, err = os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644); err != nil {
		return nil, err
	}
	if err := s.file.Truncate(int64(whole)); err != nil {
		return nil, err
	}
	_, err = s.file.Seek(int64(whole), 0)
	return s, err
}

func (s *samples) close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// add keeps what a run gave.
func (s *samples) add(c cell, m report.Metrics) error {
	sample := report.Sample{}
	for _, name := range metrics {
		if v, ok := m[name]; ok {
			sample[name] = v.Mean
		}
	}
	s.of[c] = sample
	if s.file == nil {
		return nil
	}
	text, err := json.Marshal(line{c, sample})
	if err != nil {
		return err
	}
	_, err = s.file.Write(append(text, '\n'))
	return err
}

// check runs one of the cells that are in the file already, and fails if it gives something else
// now: then they are of another program, and would stand beside those of this one.
func (s *samples) check(ctx context.Context, cells []cell) error {
	for _, c := range cells {
		was, ok := s.of[c]
		if !ok || s.file == nil {
			continue
		}
		m, err := c.run(ctx, s)
		if err != nil {
			return err
		}
		for name, x := range was {
			if m[name].Mean != x {
				return fmt.Errorf("%s: %s of %v was %v and is %v: another program made these samples; remove the file", s.file.Name(), name, c, x,
					m[name].Mean)
			}
		}
		return nil
	}
	return nil
}

// base is the run of the same seed that says how long a step takes without prefills.
func (c cell) base() cell {
	c.Steps, c.Arm = 0, arms[lateNow].name
	return c
}

// run is what the cell gives. The run that it is based on must be there.
func (c cell) run(ctx context.Context, s *samples) (report.Metrics, error) {
	src, err := source(c.Trace)
	if err != nil {
		return nil, err
	}
	a := armOf(c.Arm)
	plan := decode.Plan{
		Source: src.Source, Requests: c.Requests, Seeds: c.Seeds, Fleet: decode.Uniform(c.Ranks, c.Slots, 0), Window: window,
		Policies: []string{a.policy}, Load: a.load,
	}
	if plan.Load.Rho, err = rho(c.Load); err != nil {
		return nil, err
	}
	if plan.Load.Rho == 0 {
		plan.Load.Pool = 4 * c.Ranks
	}
	plan.Load.Prefill = &decode.Prefill{}
	if c.Steps > 0 {
		usual, stepMs := decode.DefaultPrefill, s.of[c.base()][report.StepMean]
		scale := c.Steps * stepMs / (usual.Ms + usual.PerTokenMs*src.prompt)
		plan.Load.Prefill = &decode.Prefill{Ms: scale * usual.Ms, PerTokenMs: scale * usual.PerTokenMs}
	}
	m, err := plan.RunAlone(ctx, c.Seed)
	return decode.Repeatable(m), err
}
