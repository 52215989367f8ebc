package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

const (
	paceWindow = 20 * time.Second // time over which a rank's pace is measured
	paceTokens = 50               // tokens in this window, at least, for the pace to be known
	fewAnswers = 20               // with fewer answers, the share of empty ones proves nothing

	span       = 2 * time.Second // ranks are compared in spans of this length
	spans      = 30
	spanTokens = 6 // tokens that a rank must give in a span for its pace to be known

	// A rank is slow in a span if its time per token is slowRank times that of the median rank of its group, and slowRankMs longer. It is
	// reported if it was slow in slowSpans spans. Aggregated ranks need more such spans, because each prompt makes a rank slow for a while.
	slowRank      = 3
	slowRankMs    = 20
	slowMinRanks  = 3 // if fewer ranks of a group have a known pace, none is judged
	slowSpans     = 8
	slowSpansBoth = 16
)

// pace is how fast a rank generated tokens lately.
type pace struct {
	ms     float64 // mean time between two tokens of an answer; 0: too few tokens came
	lately Lately
	spans  [spans]float64 // ms per token in each of the last spans, newest first; 0: too few tokens came
}

// stretch sums the tokens and the time of a rank's streams over some period.
type stretch struct {
	ms     float64 // time, summed over the streams that ran
	tokens int64
}

// pace returns the mean time per token of a stream, in ms; 0: fewer than least tokens came.
func (s stretch) pace(least int64) float64 {
	if s.tokens < least {
		return 0
	}
	return s.ms / float64(s.tokens)
}

// paces returns the pace of each rank of the last sample. It goes back through the samples, one per second, from the newest one.
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
				break // its counter is lower than before: the rank began anew, and older values are not its own
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
		for i := range bySpan { // a span may have too few tokens although streams run; then the mean of the minute stands in
			if p.spans[i] == 0 && bySpan[i].ms >= float64(span.Milliseconds()) {
				p.spans[i] = minute.ms / float64(max(1, minute.tokens))
			}
		}
		paces[record.ID] = p
	}
	return paces
}

// oldest returns the oldest record of a rank that is not older than age; nil: there is none.
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

// since counts the answers since an earlier record; zero: there is none, or it has more answers and so belongs to another rank.
func (x *RankAt) since(before *RankAt) Lately {
	if before == nil || before.Answers > x.Answers || before.Empty > x.Empty {
		return Lately{}
	}
	return Lately{x.Answers - before.Answers, x.Empty - before.Empty}
}

// pace fills in the pace of a group's ranks, and finds those that were slow in many spans.
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
	ms, middle float64 // sums over these spans of the time per token: of the rank, and of the median rank
}

func (s *stretches) add(ms, middle float64) { s.n, s.ms, s.middle = s.n+1, s.ms+ms, s.middle+middle }

// mean returns the mean time per token in these spans, in ms, for the rank and for the median rank; 0: there are fewer spans than least.
func (s *stretches) mean(least int) (ms, others float64) {
	if s.n < least {
		return 0, 0
	}
	return s.ms / float64(s.n), s.middle / float64(s.n)
}

// median returns the median of the numbers, and sorts them; 0: there are none.
func median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return stats.Median(all)
}
