package fit

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/predictor"
)

// History is what a predictor learns from: past requests in order of arrival.
type History struct {
	Source  predictor.Source
	Samples []predictor.Sample
	Notes   []string // what was left out, and why
}

// FromTrace reads a trace, Azure's or Mooncake's.
func FromTrace(path string) (*History, error) {
	t, err := trace.Read(path, trace.Options{})
	if err != nil {
		return nil, err
	}
	h := &History{Notes: t.Notes(), Samples: Samples(t.Requests)}
	err = h.identify(path, t.Start)
	return h, err
}

// Samples are what predictors learn of requests.
func Samples(requests []trace.Request) []predictor.Sample {
	out := make([]predictor.Sample, len(requests))
	for i := range requests {
		r := &requests[i]
		out[i] = predictor.Sample{At: r.At, Prompt: int32(r.Prompt), Output: int32(r.Output), Key: r.PromptKey()}
	}
	return out
}

// FromLog reads a request log. Requests that did not end by themselves say
// only that they would have gone on, so they are left out.
func FromLog(path string) (*History, error) {
	log, err := ReadRequestLog(path)
	if err != nil {
		return nil, err
	}
	h := &History{}
	if log.Cut {
		h.Notes = append(h.Notes, cutNote)
	}
	if names := models(log.Requests); len(names) > 1 {
		h.Notes = append(h.Notes, fmt.Sprintf("the log has %d models, %s; they were fitted together", len(names), strings.Join(names, ", ")))
	}
	first := log.Requests[0].Arrival
	ended, several, keys := 0, 0, 0
	for _, r := range log.Requests {
		switch {
		case r.Outcome != "ok" || r.Output == 0:
			ended++
			continue
		case r.Attempts > 1:
			several++
			continue
		case r.Key != 0:
			keys++
		}
		h.Samples = append(h.Samples, predictor.Sample{
			At: r.Arrival.Sub(first), End: r.Finished.Sub(first), Prompt: int32(r.Prompt), Output: int32(r.Output), Key: r.Key,
		})
	}
	if ended > 0 {
		h.Notes = append(h.Notes, fmt.Sprintf("%d requests were cancelled, failed or made no token, and were left out", ended))
	}
	if several > 0 {
		h.Notes = append(h.Notes,
			fmt.Sprintf("%d requests of several attempts were left out: their tokens may be those of several answers", several))
	}
	if keys == 0 {
		h.Notes = append(h.Notes, "the log has no prompt_key: kind exact has prompt lengths to go by, not prompts")
	}
	if len(h.Samples) == 0 {
		return nil, fmt.Errorf("%s: none of %d requests ended by itself at the first attempt", path, len(log.Requests))
	}
	err = h.identify(path, first)
	return h, err
}

// identify fills in where the samples come from. start is zero where the
// source's clock is no date.
func (h *History) identify(path string, start time.Time) error {
	sum, err := sha256Of(path)
	if err != nil {
		return err
	}
	at := func(s predictor.Sample) string {
		if start.IsZero() {
			return s.At.String()
		}
		return start.Add(s.At).UTC().Format(time.RFC3339Nano)
	}
	h.Source = predictor.Source{File: path, SHA256: sum, Rows: len(h.Samples), From: at(h.Samples[0]), To: at(h.Samples[len(h.Samples)-1])}
	return nil
}

func sha256Of(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

// Prediction is a fitted predictor and how good it is, as `fit --json` prints it.
type Prediction struct {
	Kind        predictor.Kind          `json:"kind"` // the one in the file
	Horizon     int                     `json:"horizon"`
	Source      predictor.Source        `json:"source"`
	TrainedOn   int                     `json:"trained_on"` // requests, the earlier, for the scores; the file has all
	HeldOut     int                     `json:"held_out"`   // requests, the later
	Scores      predictor.Scores        `json:"holdout"`
	Base        predictor.Scores        `json:"base"`
	Compared    []predictor.Comparison  `json:"compared"` // every kind that was tried
	Reliability []predictor.Reliability `json:"reliability"`
	File        string                  `json:"file"`
	Plot        string                  `json:"plot"`
	Notes       []string                `json:"notes,omitempty"`
}

// Train fits a kind to a history, writes the fit file and beside it the
// reliability plot.
func Train(kind string, h *History, opt predictor.Options, out string) (*Prediction, error) {
	plot, err := plotPath(out)
	if err != nil {
		return nil, err
	}
	opt.Source = h.Source
	f, err := predictor.Train(kind, h.Samples, opt)
	if err != nil {
		return nil, err
	}
	b, err := f.Encode()
	if err != nil {
		return nil, err
	}
	svg, err := reliabilityPlot(f)
	if err != nil {
		return nil, err
	}
	if err := report.Replace(plot, svg); err != nil {
		return nil, err
	}
	if err := report.Replace(out, b); err != nil {
		return nil, err
	}
	return &Prediction{
		Kind: f.Kind, Horizon: f.Holdout.Horizon, Source: f.Source, TrainedOn: f.Source.Rows - f.Holdout.Requests, HeldOut: f.Holdout.Requests,
		Scores: f.Holdout.Scores, Base: f.Holdout.Base, Reliability: f.Holdout.Reliability, Compared: f.Compared, File: out, Plot: plot,
		Notes: h.Notes,
	}, nil
}

// WriteText prints the scores and a small reliability plot.
func (p *Prediction) WriteText(out io.Writer) error {
	fmt.Fprintf(out, "%s: %d requests from %s to %s\n", p.Source.File, p.Source.Rows, p.Source.From, p.Source.To)
	fmt.Fprintf(out, "sha256 %s\n", p.Source.SHA256)
	fmt.Fprintf(out, "trained on the first %d, scored on the last %d: %d rows, horizon %d; then fitted to all %d\n\n", p.TrainedOn, p.HeldOut,
		p.Scores.Rows, p.Horizon, p.Source.Rows)
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "kind\tROC-AUC\tBrier\tconditional MAE\t\t")
	for _, c := range p.Compared {
		mark := ""
		if c.Kind == p.Kind {
			mark = "<- " + p.File
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t\n", c.Kind, figure(c.AUC), figure(c.Brier), figure(c.ConditionalMAE), mark)
	}
	fmt.Fprintf(w, "base rate\t%s\t%s\t%s\t\t\n", figure(p.Base.AUC), figure(p.Base.Brier), figure(p.Base.ConditionalMAE))
	if err := w.Flush(); err != nil {
		return err
	}
	writeReliability(out, p.Reliability)
	fmt.Fprintf(out, "plot: %s\n", p.Plot)
	writeNotes(out, p.Notes)
	return nil
}

func figure(f predictor.Figure) string {
	if !f.Defined() {
		return "-"
	}
	return fmt.Sprintf("%.4f", float64(f))
}

// CanWrite tells whether report.Replace could write a file. It is called before the
// work whose result the file is to hold.
func CanWrite(path string) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return fmt.Errorf("%s is a folder; name a file", path)
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return fmt.Errorf("%s cannot be written: %w", path, errors.Unwrap(err))
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}
