package vectors

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// Params are the settings that stand beside a snapshot, by the policies' names for them; nil where
// it names none.
type Params struct {
	Policy    string   `json:"policy"`
	Window    *int     `json:"window"`
	Theta     *int64   `json:"theta"`
	Queue     *string  `json:"queue"`
	Order     *string  `json:"order"`
	Watermark *float64 `json:"watermark"`
	MaxAgeMs  *float64 `json:"max_age_ms"`

	// Of policies with a horizon.
	Horizon *int     `json:"horizon"`
	Alpha   *float64 `json:"alpha"`
	Beta    *float64 `json:"beta"`
	Gamma   *float64 `json:"gamma"`
}

// Complete returns the spec with the parameters that it takes and does not set.
func (p Params) Complete(sp policy.Spec) (policy.Spec, error) {
	all := reflect.ValueOf(p)
	for i := range all.NumField() {
		key, value := all.Type().Field(i).Tag.Get("json"), all.Field(i)
		if value.Kind() != reflect.Pointer || value.IsNil() || !sp.Accepts(key) || sp.Sets(key) {
			continue
		}
		var err error
		if sp, err = sp.With(key, fmt.Sprint(value.Elem())); err != nil {
			return policy.Spec{}, fmt.Errorf("snapshot: %w", err)
		}
	}
	return sp, nil
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// snapshotJSON is the `in` object of a br0 or brh vector and of a line
// of the decision log.
type snapshotJSON struct {
	Params
	Workers []workerJSON `json:"workers"`
	Pool    []entryJSON  `json:"pool"`
	StepMs  float32      `json:"step_ms"`
	C0Ms    float32      `json:"c0_ms"`
	C1Ms    float32      `json:"c1_ms"`
	Request int64        `json:"request_tokens"` // KV tokens that a request weighs as much as
	Row     int64        `json:"row_tokens"`     // and more, on the rank with most requests
	Budget  int32        `json:"budget"`         // evaluations, 0 = the policy's own
	Outputs []int32      `json:"outputs"`        // finished lengths, of which the mean counts
	Early   bool         `json:"early"`          // entries are bound before their prefill

	// Of ranks that prefill and decode.
	Mixed      bool     `json:"mixed"`
	OwnMs      float32  `json:"own_prefill_ms"`
	Unbegun    *float32 `json:"unbegun"`     // requests that wait for their first token, in the mean; absent: nobody knows
	PromptRate *float32 `json:"prompt_rate"` // tokens of prompts that the ranks compute per second, likewise
}

type workerJSON struct {
	ID       int32         `json:"id"`
	Free     int32         `json:"free"`
	Up       *bool         `json:"up"`
	Capacity int64         `json:"capacity_tokens"`
	Cost     float32       `json:"cost"`
	Others   int64         `json:"others_tokens"` // of requests that are not the dispatcher's
	Running  []requestJSON `json:"running"`
	Backlog  int64         `json:"backlog_tokens"` // of ranks that prefill
}

type requestJSON struct {
	Prompt    int32   `json:"prompt"`
	Generated int32   `json:"generated"`
	Age       *int32  `json:"age"`
	Away      int32   `json:"away"` // of its KV tokens, those that others_tokens of other workers have
	Rhat      float32 `json:"rhat"`
	Key       uint64  `json:"key"`
	ID        *uint64 `json:"id"`
	Slot      *int32  `json:"slot"`
}

type entryJSON struct {
	ID      uint64  `json:"id"`
	Prompt  int32   `json:"prompt"`
	Age     int32   `json:"age"`
	WaitMs  float32 `json:"age_ms"`
	Urgent  bool    `json:"urgent"`
	Express bool    `json:"express"`
	Key     uint64  `json:"key"`

	// Of ranks that prefill.
	HeldMs     *float64   `json:"held_ms"`
	UrgentInMs float64    `json:"urgent_in_ms"`
	Hits       [][2]int32 `json:"hits"` // worker and tokens
}

// ErrSeveral is a text with more than one JSON value, such as a whole log.
var ErrSeveral = errors.New("more than one JSON value")

// ReadSnapshot reads a snapshot and the parameters beside it: the `in` object
// of a vector, or the whole line (a vector's or the decision log's) that holds
// one. Unknown keys are refused: a misspelt one would silently be zero.
func ReadSnapshot(data []byte) (policy.Snapshot, Params, error) {
	var line struct {
		In json.RawMessage `json:"in"`
	}
	first := json.NewDecoder(bytes.NewReader(data))
	if err := first.Decode(&line); err != nil {
		return policy.Snapshot{}, Params{}, fmt.Errorf("snapshot: %w", err)
	}
	var second json.RawMessage
	switch err := first.Decode(&second); {
	case err == nil:
		return policy.Snapshot{}, Params{}, fmt.Errorf("snapshot: %w", ErrSeveral)
	case !errors.Is(err, io.EOF):
		return policy.Snapshot{}, Params{}, fmt.Errorf("snapshot: %w", err)
	}
	if line.In != nil {
		data = line.In
	}
	var in snapshotJSON
	if err := decodeStrict(data, &in); err != nil {
		return policy.Snapshot{}, Params{}, fmt.Errorf("snapshot: %w", err)
	}
	s, err := in.snapshot()
	if err != nil {
		return policy.Snapshot{}, Params{}, fmt.Errorf("snapshot: %w", err)
	}
	return s, in.Params, nil
}

// decodeStrict reads exactly one JSON value with known keys only.
func decodeStrict(data []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return ErrSeveral
	}
	return nil
}

// maxCost keeps scaled loads far from the end of an int64.
const maxCost = 1000

func (in *snapshotJSON) snapshot() (policy.Snapshot, error) {
	s := policy.Snapshot{
		MaxAgeMs: float32(deref(in.MaxAgeMs)),
		StepMs:   in.StepMs, C0Ms: in.C0Ms, C1Ms: in.C1Ms, Budget: in.Budget, RequestTokens: in.Request, RowTokens: in.Row, Aggregated: in.Mixed,
		Early: in.Early,
	}
	if in.Request < 0 || in.Row < 0 {
		return s, errors.New("request_tokens and row_tokens cannot be negative")
	}
	if in.Mixed {
		s.OwnPromptMs, s.NotStarted, s.PromptRate = in.OwnMs, -1, -1
		if in.Unbegun != nil && in.PromptRate != nil {
			s.NotStarted, s.PromptRate = *in.Unbegun, *in.PromptRate
		}
	}
	if len(in.Outputs) > 0 {
		s.MeanOutput = predictor.NewSurvival(in.Outputs).MeanOutput()
	}
	running := int32(0)
	for _, w := range in.Workers {
		if w.Capacity < 0 || !(w.Cost >= 0 && w.Cost <= maxCost) {
			return s, fmt.Errorf("worker %d: want capacity_tokens from 0 and cost from 0 to %d", w.ID, maxCost)
		}
		if w.Others < 0 {
			return s, fmt.Errorf("worker %d: others_tokens cannot be negative", w.ID)
		}
		if w.Backlog < 0 {
			return s, fmt.Errorf("worker %d: backlog_tokens cannot be negative", w.ID)
		}
		worker := policy.Worker{ID: w.ID, Free: w.Free, Up: w.Up == nil || *w.Up, Capacity: w.Capacity, Cost: w.Cost, Others: w.Others,
			Backlog: w.Backlog}
		for i, r := range w.Running {
			if r.Prompt < 0 || r.Generated < 0 {
				return s, fmt.Errorf("worker %d, running[%d]: prompt and generated cannot be negative", w.ID, i)
			}
			if r.Away < 0 || int64(r.Away) > int64(r.Prompt)+int64(r.Generated) {
				return s, fmt.Errorf("worker %d, running[%d]: away is a part of prompt and generated", w.ID, i)
			}
			age := r.Generated // what it generated here is all there is, unless the snapshot says more
			if r.Age != nil {
				age = *r.Age
			}
			q := policy.Request{
				Prompt: r.Prompt, Generated: r.Generated, Age: age, KVElsewhere: r.Away, Rhat: r.Rhat, Key: r.Key,
				ID: deref(r.ID), Slot: deref(r.Slot),
			}
			if r.ID == nil { // policies tell requests apart by these two
				q.ID = 1<<63 | uint64(running)
			}
			if r.Slot == nil {
				q.Slot = running
			}
			running++
			worker.Running = append(worker.Running, q)
		}
		s.Workers = append(s.Workers, worker)
	}
	for _, e := range in.Pool {
		if e.Prompt < 0 {
			return s, fmt.Errorf("pool entry %d: prompt cannot be negative", e.ID)
		}
		entry := policy.Entry{
			ID: e.ID, Prompt: e.Prompt, Age: e.Age, WaitMs: e.WaitMs, Urgent: e.Urgent, Express: e.Express, Key: e.Key,
		}
		if in.Mixed {
			s.Waits = append(s.Waits, e.wait())
		}
		s.Pool = append(s.Pool, entry)
	}
	slices.SortStableFunc(s.Workers, func(a, b policy.Worker) int { return cmp.Compare(a.ID, b.ID) })
	for i := 1; i < len(s.Workers); i++ {
		if s.Workers[i].ID == s.Workers[i-1].ID {
			return s, errors.New("two workers have id " + strconv.Itoa(int(s.Workers[i].ID)))
		}
	}
	seen := make(map[uint64]bool, len(s.Pool))
	for _, e := range s.Pool {
		if seen[e.ID] {
			return s, fmt.Errorf("two pool entries have id %d", e.ID)
		}
		seen[e.ID] = true
	}
	return s, nil
}

// wait is what only ranks that prefill want to know of an entry.
func (e *entryJSON) wait() (to policy.EntryDetails) {
	to.HeldMs, to.UrgentInMs = -1, max(0, e.UrgentInMs) // without held_ms it could never be sent
	if e.HeldMs != nil && *e.HeldMs >= 0 {
		to.HeldMs = *e.HeldMs
	}
	for _, h := range e.Hits {
		to.Hits = append(to.Hits, policy.Hit{Worker: h[0], Tokens: int(h[1])})
	}
	slices.SortStableFunc(to.Hits, func(a, b policy.Hit) int { return cmp.Compare(a.Worker, b.Worker) })
	return to
}
