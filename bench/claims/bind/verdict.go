package main

import (
	"fmt"
	"slices"

	"evenkeel/bench/tools/page"
	"evenkeel/internal/stats"
)

// What was expected of binding at arrival, with bounds that were set before anything was run.
const (
	shortPrefill = 1     // steps, that lose nothing
	nothingLost  = 0.005 // of the tokens/s
	nearlyAll    = 0.9   // of what is to be kept
	someLost     = 0.01  // of the tokens/s: from there on it is compared with what was foreseen
	tooFar       = 0.5   // of what was foreseen, above it or below
	wonBack      = 0.5   // of what is lost
)

// verdicts are what was expected, what came out, and whether that is it.
func (b *book) verdicts() string {
	t := page.Markdown{Head: []string{"expected", "found", "verdict"}, Text: 3}
	for _, v := range []func() (expected, found string, met, known bool){b.shortIsFree, b.shortIsKept, b.emptySlots, b.aheadHelps} {
		expected, found, met, known := v()
		verdict := "met"
		switch {
		case !known:
			found, verdict = "nothing was measured", unknown
		case !met:
			verdict = "**not met**"
		}
		t.Add(expected, found, verdict)
	}
	return t.String()
}

// each collects what cells say that have something to say, in ascending order.
func (b *book) each(of func(s *scenario, steps float64) (float64, bool)) (all []float64) {
	for _, s := range b.scenarios {
		for _, steps := range s.steps {
			if steps == 0 {
				continue
			}
			if x, ok := of(s, steps); ok {
				all = append(all, x)
			}
		}
	}
	slices.Sort(all)
	return all
}

func (b *book) shortIsFree() (expected, found string, met, known bool) {
	lost := b.each(func(s *scenario, steps float64) (float64, bool) {
		lost, ok := b.lost(s, steps, arrivalNow)
		return lost, ok && s.load == closed && steps <= shortPrefill
	})
	expected = fmt.Sprintf("a prefill of %d step loses nothing: at most %.1f %% of the tokens/s in a closed loop", shortPrefill,
		100*nothingLost)
	if len(lost) == 0 {
		return expected, "", false, false
	}
	return expected, fmt.Sprintf("%d of %d scenarios; %.1f %% at worst", count(lost, func(x float64) bool { return x <= nothingLost }),
			len(lost), 100*slices.Max(lost)),
		slices.Max(lost) <= nothingLost, true
}

func (b *book) shortIsKept() (expected, found string, met, known bool) {
	kept := b.each(func(s *scenario, steps float64) (float64, bool) {
		share, ok := b.kept(s, steps)
		return share, ok && steps <= shortPrefill
	})
	expected = fmt.Sprintf("a prefill of %d step keeps at least %.0f %% of what `evenkeel` gains over `jsq-kv`", shortPrefill, 100*nearlyAll)
	if len(kept) == 0 {
		return expected, "", false, false
	}
	return expected, fmt.Sprintf("%d of %d scenarios; %.0f %% at worst", count(kept, func(x float64) bool { return x >= nearlyAll }),
			len(kept), 100*slices.Min(kept)),
		slices.Min(kept) >= nearlyAll, true
}

func (b *book) emptySlots() (expected, found string, met, known bool) {
	of := b.each(func(s *scenario, steps float64) (float64, bool) {
		lost, ok := b.lost(s, steps, arrivalNow)
		return lost / foreseen(s, steps), ok && s.load == closed && foreseen(s, steps) >= someLost
	})
	expected = fmt.Sprintf("slots stand empty for steps / (steps + mean answer) of the time: the loss is within %.0f %% of this share, in "+
		"three of four cases", 100*tooFar)
	if len(of) == 0 {
		return expected, "", false, false
	}
	near := count(of, func(x float64) bool { return x >= 1-tooFar && x <= 1+tooFar })
	return expected, fmt.Sprintf("%d of %d cases; %.2f times the expected loss in the median, %.2f to %.2f", near, len(of), stats.Median(of),
		slices.Min(of), slices.Max(of)), 4*near >= 3*len(of), true
}

func (b *book) aheadHelps() (expected, found string, met, known bool) {
	of := b.each(func(s *scenario, steps float64) (float64, bool) {
		lost, ok := b.lost(s, steps, arrivalNow)
		ahead, also := b.lost(s, steps, arrivalAhead)
		return 1 - ahead/lost, ok && also && s.load == closed && lost >= someLost
	})
	expected = fmt.Sprintf("slots ahead win back at least %.0f %% of this loss in the median, and never make it larger", 100*wonBack)
	if len(of) == 0 {
		return expected, "", false, false
	}
	return expected,
		fmt.Sprintf("%d cases: %.0f %% in the median, %.0f to %.0f %%", len(of), 100*stats.Median(of), 100*slices.Min(of), 100*slices.Max(of)),
		stats.Median(of) >= wonBack && slices.Min(of) >= 0, true
}

func count(all []float64, is func(float64) bool) (n int) {
	for _, x := range all {
		if is(x) {
			n++
		}
	}
	return n
}
