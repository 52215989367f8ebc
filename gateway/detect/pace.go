package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

const (
	paceWindow = 20 * time.Second // time over which a rank's pace is measured
	paceTokens = 50               // tokens that must come in it, at least
	fewAnswers = 20               // answers from which a share of them proves something

	span       = 2 * time.Second // the length of the spans in which ranks are compared
	spans      = 30
	spanTokens = 6 // tokens that a rank must give in a span for its pace to be known

	// A rank is slow in a span if a token takes slowRank times as long as for the median rank of its group, and
	// slowRankMs longer. It is reported if it was slow in slowSpans spans. Where ranks prefill, prompts make a rank
	// slow for a while, so more spans are needed.
	slowRank      = 3
	slowRankMs    = 20
	slowMinRanks  = 3 // a group in which fewer ranks have a known pace is not judged
	slowSpans     = 8
	slowSpansBoth = 16
)

// pace is how fast the answers of a rank were lately.
type pace struct {
	ms     float64 // between two tokens of an answer; 0: too few tokens came
	lately Lately
	spans  [spans]float64 // ms for a token in each of the last spans, the newest first; 0: too few tokens came
}

// stretch sums what the streams of a rank got in some time.
type stretch struct {
	ms     float64 // time, summed over the streams that ran
	tokens int64
}

// pace is how long a token took for a stream, in ms; 0: fewer than least tokens came.
func (s stretch) pace(least int64) float64 {
	if s.tokens < least {
		return 0
	}
	return s.ms / float64(s.tokens)
}

// paces returns the pace of each rank of the last sample, by the samples of each second. It goes back from the newest one.
func (r *Ring) paces() map[int32]pace {
	list := r.fine.list
	now := &list[len(list)-1]
	paces := make(map[int32]pace, len(now.Ranks))
	for k := range now.Ranks {
		record := &now.Ranks[k]
		p := pace{lately: record.since(r.oldest(record.ID, time.Minute))}
		if p.lately.Answers < fewAnswers {
			p.lately = record.since(r.oldest(record.ID, FineFor))
		}
		var bySpan [spans]stretch
		var recent stretch
		later := record
		for i := len(list) - 2; i >= 0; i-- {
			age := now.At.Sub(list[i].At)
			index := int((age - 1) / span)
			before := list[i].rank(record.ID)
			if index >= spans || before == nil || before.Output <= 0 || later.Output < before.Output {
				break // the rank began anew, and what was before is not its own
			}
			ms := float64(list[i+1].At.Sub(list[i].At).Milliseconds()) * float64(before.Running+later.Running) / 2
			bySpan[index].ms, bySpan[index].tokens = bySpan[index].ms+ms, bySpan[index].tokens+later.Output-before.Output
			if age <= paceWindow {
				recent.ms, recent.tokens = recent.ms+ms, recent.tokens+later.Output-before.Output
			}
			later = before
		}
		p.ms = recent.pace(paceTokens)
		minute := stretch{}
		for i := range bySpan {
			p.spans[i] = bySpan[i].pace(spanTokens)
			minute.ms, minute.tokens = minute.ms+bySpan[i].ms, minute.tokens+bySpan[i].tokens
		}
		for i := range bySpan { // so few tokens come that a span alone shows nothing, although streams run
			if p.spans[i] == 0 && bySpan[i].ms >= float64(span.Milliseconds()) {
				p.spans[i] = minute.ms / float64(max(1, minute.tokens))
			}
		}
		paces[record.ID] = p
	}
	return paces
}

// oldest is the oldest record of a rank that is no older than age; nil: there is none.
func (r *Ring) oldest(id int32, age time.Duration) *RankAt {
	list := r.fine.list
	now := list[len(list)-1].At
	from, _ := slices.BinarySearchFunc(list, now.Add(-age), func(s Sample, at time.Time) int { return s.At.Compare(at) })
	for i := from; i < len(list); i++ {
		if x := list[i].rank(id); x != nil {
			return x
		}
	}
	return nil
}

// rank finds a rank; nil: the sample does not have it.
func (s *Sample) rank(id int32) *RankAt {
	if i, ok := s.places[id]; ok {
		return &s.Ranks[i]
	}
	return nil
}

// since counts the answers since an earlier record. It is zero if that is nil or has more answers, because it then
// belongs to another rank.
func (x *RankAt) since(before *RankAt) Lately {
	if before == nil || before.Answers > x.Answers || before.Empty > x.Empty {
		return Lately{}
	}
	return Lately{x.Answers - before.Answers, x.Empty - before.Empty}
}

// pace fills in what is known of the pace of a group's ranks, and finds those that were slow in several spans.
func (g *Group) pace(ranks map[int32]pace) {
	var all []float64
	slow := make([]stretches, len(g.Ranks))
	for k := range g.Ranks {
		r := &g.Ranks[k]
		found, known := ranks[r.ID]
		if known && r.Steps {
			r.TokenMs, r.Lately = found.ms, found.lately
		}
		if r.TokenMs > 0 {
			all = append(all, r.TokenMs)
		}
	}
	g.TokenMs = median(all)
	for i := range spans {
		all = all[:0]
		for k := range g.Ranks {
			if ms := ranks[g.Ranks[k].ID].spans[i]; ms > 0 && g.Ranks[k].Steps {
				all = append(all, ms)
			}
		}
		middle := median(all)
		for k := range g.Ranks {
			ms := ranks[g.Ranks[k].ID].spans[i]
			if len(all) >= slowMinRanks && g.Ranks[k].Steps && ms > slowRank*middle && ms-middle > slowRankMs {
				slow[k].add(ms, middle)
			}
		}
	}
	least := slowSpans
	if g.Rounds != nil {
		least = slowSpansBoth
	}
	for k := range g.Ranks {
		g.Ranks[k].SlowMs, g.Ranks[k].OthersMs = slow[k].mean(least)
	}
}

// stretches counts the spans in which a rank was slow.
type stretches struct {
	n          int
	ms, middle float64 // of a token in these spans: for the rank, and for the median rank; summed
}

func (s *stretches) add(ms, middle float64) { s.n, s.ms, s.middle = s.n+1, s.ms+ms, s.middle+middle }

// mean is how long a token took on average in these spans, in ms, for the rank and for the median rank; 0: the spans are
// fewer than least.
func (s *stretches) mean(least int) (ms, others float64) {
	if s.n < least {
		return 0, 0
	}
	return s.ms / float64(s.n), s.middle / float64(s.n)
}

// median is the median of some numbers, which it sorts; 0: there are none.
func median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return stats.Median(all)
}
