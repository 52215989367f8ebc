package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

const (
	paceWindow = 20 * time.Second // time over which a rank's pace is measured
	paceTokens = 50               // fewer tokens in this time say too little
	fewAnswers = 20               // a share of fewer answers proves nothing

	span       = 2 * time.Second // the length of the spans in which ranks are compared
	spans      = 30              // spans that are compared: one minute
	spanTokens = 6               // a rank with fewer tokens in a span has no known pace in it

	// A rank is slow in a span if its tokens take slowRank times as long as those of the group's median rank, and also
	// slowRankMs longer. It is reported if it was slow in slowSpans of the spans. Ranks that also prefill need
	// slowSpansBoth, because each prompt makes a rank slow for a while.
	slowRank      = 3
	slowRankMs    = 20
	slowMinRanks  = 3 // a group in which fewer ranks have a known pace is not judged
	slowSpans     = 8
	slowSpansBoth = 16
)

// pace is how fast a rank gave tokens lately.
type pace struct {
	ms     float64 // mean time between two tokens of an answer; 0: too few tokens came
	lately AnswerCounts
	spans  [spans]float64 // ms for a token in each of the last spans, the newest first; 0: too few tokens came
}

// stretch sums up the streams of a rank over some time.
type stretch struct {
	ms     float64 // time, summed over the streams that ran
	tokens int64
}

func (s *stretch) add(ms float64, tokens int64) { s.ms, s.tokens = s.ms+ms, s.tokens+tokens }

// pace is the mean time per token of one stream, in ms; 0: fewer than least tokens came.
func (s stretch) pace(least int64) float64 {
	if s.tokens < least {
		return 0
	}
	return s.ms / float64(s.tokens)
}

// paces returns the pace of each rank in the newest sample.
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
		bySpan, recent, minute := r.streamsOf(record)
		p.ms = recent.pace(paceTokens)
		for i := range bySpan {
			p.spans[i] = bySpan[i].pace(spanTokens)
			// Streams ran, but so few tokens came that this span alone shows nothing: the pace of the minute stands for it.
			if p.spans[i] == 0 && bySpan[i].ms >= float64(span.Milliseconds()) {
				p.spans[i] = minute.ms / float64(max(1, minute.tokens))
			}
		}
		paces[record.ID] = p
	}
	return paces
}

// streamsOf sums up the streams of a rank, whose newest record is given: in each of the last spans, in the last paceWindow (recent), and in
// all spans together (minute). It goes back from sample to sample.
func (r *Ring) streamsOf(record *RankAt) (bySpan [spans]stretch, recent, minute stretch) {
	list := r.fine.list
	now := list[len(list)-1].At
	later := record
	for i := len(list) - 2; i >= 0; i-- {
		age := now.Sub(list[i].At)
		index := int((age - 1) / span)
		before := list[i].rank(record.ID)
		if index >= spans || before == nil || before.Output <= 0 || later.Output < before.Output {
			break // the samples end here, or the totals began anew: earlier ones are of another engine process
		}
		// Running is known at both ends only, so its mean stands for the time between them.
		ms := float64(list[i+1].At.Sub(list[i].At).Milliseconds()) * float64(before.Running+later.Running) / 2
		tokens := later.Output - before.Output
		bySpan[index].add(ms, tokens)
		minute.add(ms, tokens)
		if age <= paceWindow {
			recent.add(ms, tokens)
		}
		later = before
	}
	return bySpan, recent, minute
}

// oldest is the oldest record of a rank that is no older than age; nil: there is none.
func (r *Ring) oldest(id int32, age time.Duration) *RankAt {
	list := r.fine.list
	now := list[len(list)-1].At
	from, _ := slices.BinarySearchFunc(list, now.Add(-age), func(s Sample, at time.Time) int { return s.At.Compare(at) })
	for i := from; i < len(list); i++ {
		if record := list[i].rank(id); record != nil {
			return record
		}
	}
	return nil
}

// rank returns the record of a rank; nil: the sample has none.
func (s *Sample) rank(id int32) *RankAt {
	if i, ok := s.places[id]; ok {
		return &s.Ranks[i]
	}
	return nil
}

// since counts the answers since an earlier record. It returns zero without a record, or if the counts have become smaller: then the record
// belongs to another rank.
func (r *RankAt) since(before *RankAt) AnswerCounts {
	if before == nil || before.Answers > r.Answers || before.Empty > r.Empty {
		return AnswerCounts{}
	}
	return AnswerCounts{r.Answers - before.Answers, r.Empty - before.Empty}
}

// fillInPaces fills in the token times and the answers lately of the group's ranks, the median token time of the group, and the times of
// ranks that were slow in several spans.
func (g *Group) fillInPaces(ranks map[int32]pace) {
	var all []float64
	for k := range g.Ranks {
		r := &g.Ranks[k]
		found, known := ranks[r.ID]
		if known && r.InSteps {
			r.TokenMs, r.RecentAnswers = found.ms, found.lately
		}
		if r.TokenMs > 0 {
			all = append(all, r.TokenMs)
		}
	}
	g.TokenMs = median(all)
	g.markSlow(ranks)
}

// markSlow fills in SlowMs and OthersMs of the ranks that were slow in several spans.
func (g *Group) markSlow(ranks map[int32]pace) {
	var all []float64 // token times of all ranks in one span
	slow := make([]slowness, len(g.Ranks))
	for i := range spans {
		all = all[:0]
		for k := range g.Ranks {
			if ms := ranks[g.Ranks[k].ID].spans[i]; ms > 0 && g.Ranks[k].InSteps {
				all = append(all, ms)
			}
		}
		middle := median(all)
		for k := range g.Ranks {
			ms := ranks[g.Ranks[k].ID].spans[i]
			if len(all) >= slowMinRanks && g.Ranks[k].InSteps && ms > slowRank*middle && ms-middle > slowRankMs {
				slow[k].add(ms, middle)
			}
		}
	}
	least := slowSpans
	if g.Rounds != nil { // the ranks prefill
		least = slowSpansBoth
	}
	for k := range g.Ranks {
		g.Ranks[k].SlowMs, g.Ranks[k].OthersMs = slow[k].mean(least)
	}
}

// slowness counts the spans in which a rank was slow.
type slowness struct {
	n          int
	ms, middle float64 // sums over these spans of the time per token: of the rank, and of the median rank
}

func (s *slowness) add(ms, middle float64) { s.n, s.ms, s.middle = s.n+1, s.ms+ms, s.middle+middle }

// mean returns the mean time per token in these spans, in ms, of the rank and of the median rank; 0: there are fewer than least
// spans.
func (s *slowness) mean(least int) (ms, others float64) {
	if s.n < least {
		return 0, 0
	}
	return s.ms / float64(s.n), s.middle / float64(s.n)
}

// median returns the median of the numbers and sorts them; 0: there are none.
func median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return stats.Median(all)
}
