package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

const (
	paceWindow    = 20 * time.Second // over which a rank's pace is measured
	minPaceTokens = 50               // fewer tokens in paceWindow: the pace is not known
	fewAnswers    = 20               // fewer answers prove nothing

	span          = 2 * time.Second // in which ranks are compared
	spans         = 30              // one minute
	minSpanTokens = 6               // fewer tokens in a span: the pace is not known

	// A rank is slow in a span if its tokens take slowRankTimes as long as those of the group's median
	// rank, and slowRankMs longer. It is reported after slowSpans such spans. Ranks that also prefill
	// need slowSpansBoth, because each prompt makes them slow for a while.
	slowRankTimes = 3
	slowRankMs    = 20
	slowMinRanks  = 3 // a group with fewer known paces is not judged
	slowSpans     = 8
	slowSpansBoth = 16
)

type pace struct {
	tokenMs float64 // between two tokens of an answer; 0: too few tokens
	answers AnswerCounts
	spanMs  [spans]float64 // in each of the last spans, the newest first; 0: too few tokens
}

// streamSum sums up the streams of a rank over some time.
type streamSum struct {
	streamMs float64 // two streams for 1 s are 2000 ms
	tokens   int64
}

func (s *streamSum) add(ms float64, tokens int64) {
	s.streamMs, s.tokens = s.streamMs+ms, s.tokens+tokens
}

// msPerToken is 0 for fewer than leastTokens.
func (s streamSum) msPerToken(leastTokens int64) float64 {
	if s.tokens < leastTokens {
		return 0
	}
	return s.streamMs / float64(s.tokens)
}

// measurePaces returns the paces in the newest sample, by Rank.ID.
func (r *Ring) measurePaces() map[int32]pace {
	list := r.fine.list
	now := &list[len(list)-1]
	paces := make(map[int32]pace, len(now.Ranks))
	for k := range now.Ranks {
		record := &now.Ranks[k]
		tokenMs, spanMs := r.tokenTimes(record)
		paces[record.ID] = pace{tokenMs: tokenMs, answers: r.recentAnswers(record), spanMs: spanMs}
	}
	return paces
}

// recentAnswers are those of the last minute or, if these are too few to judge, of five minutes.
// record is the newest record of the rank.
func (r *Ring) recentAnswers(record *RankAt) AnswerCounts {
	ofMinute := record.answersSince(r.oldestRecordWithin(record.ID, time.Minute))
	if ofMinute.Answers >= fewAnswers {
		return ofMinute
	}
	return record.answersSince(r.oldestRecordWithin(record.ID, SecondsKeptFor))
}

// tokenTimes returns 0 where too little was measured. record is the newest record of the rank.
func (r *Ring) tokenTimes(record *RankAt) (tokenMs float64, spanMs [spans]float64) {
	bySpan, recent, minute := r.streamsOf(record)
	for i := range bySpan {
		spanMs[i] = bySpan[i].msPerToken(minSpanTokens)
		// one for the whole span, or several for parts
		aStreamRan := bySpan[i].streamMs >= float64(span.Milliseconds())
		if spanMs[i] == 0 && aStreamRan { // without a stream, the rank was idle, and not slow
			// The mean of the minute stands for the span: it is from more tokens, or very large if even the
			// minute has hardly any.
			spanMs[i] = minute.streamMs / float64(max(1, minute.tokens))
		}
	}
	return recent.msPerToken(minPaceTokens), spanMs
}

// streamsOf sums up the streams of a rank per span, in paceWindow (recent), and in all spans
// (minute). record is the newest record of the rank.
func (r *Ring) streamsOf(record *RankAt) (bySpan [spans]streamSum, recent, minute streamSum) {
	list := r.fine.list
	now := list[len(list)-1].At
	later := record
	for i := len(list) - 2; i >= 0; i-- {
		age := now.Sub(list[i].At)
		index := int((age - 1) / span) // in which the time between the samples i and i+1 begins
		before := list[i].rank(record.ID)
		isUnknown := before == nil || before.Output <= 0 // not there, or without any tokens yet
		if index >= spans || isUnknown || later.Output < before.Output {
			break // the minute ends, nothing earlier is known, or the totals are of another engine process
		}
		// How many streams ran is known only at the two samples, so their mean is taken.
		streamMs := float64(list[i+1].At.Sub(list[i].At).Milliseconds()) * float64(before.Running+later.Running) / 2
		tokens := later.Output - before.Output
		bySpan[index].add(streamMs, tokens)
		minute.add(streamMs, tokens)
		if age <= paceWindow {
			recent.add(streamMs, tokens)
		}
		later = before
	}
	return bySpan, recent, minute
}

// oldestRecordWithin returns nil if there is none.
func (r *Ring) oldestRecordWithin(id int32, age time.Duration) *RankAt {
	list := r.fine.list
	now := list[len(list)-1].At
	from, _ := slices.BinarySearchFunc(list, now.Add(-age), func(s Sample, at time.Time) int { return s.At.Compare(at) })
	for i := from; i < len(list); i++ { // the rank may have come later
		if record := list[i].rank(id); record != nil {
			return record
		}
	}
	return nil
}

func (s *Sample) rank(id int32) *RankAt {
	if i, ok := s.rankIndex[id]; ok {
		return &s.Ranks[i]
	}
	return nil
}

// answersSince: smaller counts are of another rank, and count as none.
func (r *RankAt) answersSince(before *RankAt) AnswerCounts {
	if before == nil || before.Answers > r.Answers || before.Empty > r.Empty {
		return AnswerCounts{}
	}
	return AnswerCounts{r.Answers - before.Answers, r.Empty - before.Empty}
}

// fillInPaces: a rank that takes no part in the steps keeps zeros.
func (g *Group) fillInPaces(ranks map[int32]pace) {
	var all []float64
	for k := range g.Ranks {
		r := &g.Ranks[k]
		measured, isMeasured := ranks[r.ID]
		if isMeasured && r.InSteps {
			r.TokenMs, r.RecentAnswers = measured.tokenMs, measured.answers
		}
		if r.TokenMs > 0 {
			all = append(all, r.TokenMs)
		}
	}
	g.TokenMs = median(all)
	g.fillInSlowRanks(ranks)
}

// fillInSlowRanks sets SlowMs and OthersMs, which are 0 for ranks that were not slow. Ranks outside
// the group's steps are left out.
func (g *Group) fillInSlowRanks(ranks map[int32]pace) {
	var all []float64 // in one span
	slow := make([]slowSpanSums, len(g.Ranks))
	for i := range spans {
		all = all[:0]
		for k := range g.Ranks {
			if ms := ranks[g.Ranks[k].ID].spanMs[i]; ms > 0 && g.Ranks[k].InSteps {
				all = append(all, ms)
			}
		}
		middle, enoughRanks := median(all), len(all) >= slowMinRanks
		for k := range g.Ranks {
			ms := ranks[g.Ranks[k].ID].spanMs[i]
			isSlow := ms > slowRankTimes*middle && ms-middle > slowRankMs
			if enoughRanks && g.Ranks[k].InSteps && isSlow {
				slow[k].add(ms, middle)
			}
		}
	}
	leastSpans := slowSpans
	if g.Rounds != nil { // each prompt makes a rank slow for a while
		leastSpans = slowSpansBoth
	}
	for k := range g.Ranks {
		g.Ranks[k].SlowMs, g.Ranks[k].OthersMs = slow[k].mean(leastSpans) // 0: in fewer spans
	}
}

type slowSpanSums struct {
	spans            int
	rankMs, middleMs float64 // of the rank and of the median rank, summed over the slow spans
}

func (s *slowSpanSums) add(ms, middle float64) {
	s.spans, s.rankMs, s.middleMs = s.spans+1, s.rankMs+ms, s.middleMs+middle
}

// mean is 0 for fewer than leastSpans.
func (s *slowSpanSums) mean(leastSpans int) (ms, others float64) {
	if s.spans < leastSpans {
		return 0, 0
	}
	return s.rankMs / float64(s.spans), s.middleMs / float64(s.spans)
}

// median sorts the numbers; 0: there are none.
func median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return stats.Median(all)
}
