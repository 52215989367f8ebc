package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/rigs/real/ranks"
)

// part is what a rank did in a step.
type part struct {
	prompt  float64 // tokens of prompts that it computed
	decodes float64 // requests that got their next token
	kv      float64 // KV tokens of these
}

// step is one of all ranks.
type step struct {
	at     time.Time // when the last rank began
	length time.Duration
	ranks  [ranks.Count]part
}

// prefilling is how many ranks computed a prompt.
func (s *step) prefilling() (n int) {
	for _, r := range s.ranks {
		if r.prompt > 0 {
			n++
		}
	}
	return n
}

// number is what all ranks call a step.
type number struct{ wave, step int64 }

// told is what a rank wrote down of a step.
type told struct {
	number
	began, ended int64 // ns
	part
}

// read reads the lines of a rank. The last one may be half written.
func read(log []byte) (list []told, err error) {
	for line := range strings.Lines(string(log)) {
		if !strings.HasSuffix(line, "\n") {
			break
		}
		var t told
		if _, err := fmt.Sscan(line, &t.wave, &t.number.step, &t.began, &t.ended, &t.prompt, &t.decodes, &t.kv); err != nil {
			return nil, fmt.Errorf("%q is no step: %w", line, err)
		}
		list = append(list, t)
	}
	return list, nil
}

// join makes steps of what the ranks wrote down. A step lasts until the next one begins, and the
// last one of a wave until all ranks have ended it. A step in which no rank did anything is none.
func join(logs [ranks.Count][]byte) (steps []step, err error) {
	type whole struct {
		number
		began, ended int64
		parts        []part
	}
	by := map[number]*whole{}
	for _, log := range logs {
		list, err := read(log)
		if err != nil {
			return nil, err
		}
		for _, t := range list {
			w := by[t.number]
			if w == nil {
				w = &whole{number: t.number}
				by[t.number] = w
			}
			w.began, w.ended, w.parts = max(w.began, t.began), max(w.ended, t.ended), append(w.parts, t.part)
		}
	}
	var all []*whole
	for _, w := range by {
		if len(w.parts) == ranks.Count {
			all = append(all, w)
		}
	}
	slices.SortFunc(all, func(a, b *whole) int { return cmp.Or(cmp.Compare(a.wave, b.wave), cmp.Compare(a.step, b.step)) })
	for i, w := range all {
		end := w.ended
		if i+1 < len(all) && all[i+1].number == (number{w.wave, w.step + 1}) {
			end = all[i+1].began
		}
		s := step{at: time.Unix(0, w.began), length: time.Duration(end - w.began), ranks: [ranks.Count]part(w.parts)}
		if s.ranks != [ranks.Count]part{} {
			steps = append(steps, s)
		}
	}
	return steps, nil
}

// within are the steps that began in a time.
func within(steps []step, from, to time.Time) []step {
	at := func(t time.Time) int {
		n, _ := slices.BinarySearchFunc(steps, t, func(s step, t time.Time) int { return s.at.Compare(t) })
		return n
	}
	return steps[at(from):max(at(from), at(to))]
}

// shares are of the time of steps: in how much of it one rank alone computed a prompt, and in how
// much all ranks did.
func shares(steps []step) (alone, together float64) {
	var all, one, every time.Duration
	for i := range steps {
		s := &steps[i]
		all += s.length
		switch s.prefilling() {
		case 1:
			one += s.length
		case ranks.Count:
			every += s.length
		}
	}
	if all == 0 {
		return 0, 0
	}
	return one.Seconds() / all.Seconds(), every.Seconds() / all.Seconds()
}
