package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

const (
	paceWindow    = 20 * time.Second // time over which a rank's pace is measured
	minPaceTokens = 50               // a rank that gave fewer tokens in paceWindow has no known pace
	fewAnswers    = 20               // a share of empty answers proves nothing if there are fewer answers than this

	span          = 2 * time.Second // the length of the spans in which ranks are compared
	spans         = 30              // spans that are compared: one minute
	minSpanTokens = 6               // a rank with fewer tokens in a span has no known pace in it

	// A rank is slow in a span if its tokens take slowRankTimes as long as those of the group's median rank, and also
	// slowRankMs longer. It is reported if it was slow in slowSpans of the spans. Ranks that also prefill need
	// slowSpansBoth, because each prompt makes a rank slow for a while.
	slowRankTimes = 3
	slowRankMs    = 20
	slowMinRanks  = 3 // a group in which fewer ranks have a known pace is not judged
	slowSpans     = 8
	slowSpansBoth = 16
)

// pace is how fast a rank gave tokens in the last seconds.
type pace struct {
	tokenMs float64 // mean time between two tokens of an answer; 0: too few tokens came
	answers AnswerCounts
	spanMs  [spans]float64 // ms for a token in each of the last spans, the newest first; 0: too few tokens came
}

// streamSum sums up the streams of a rank over some time.
type streamSum struct {
	streamMs float64 // time in ms, summed over the streams that ran: two streams that run for 1 s are 2000 ms
	tokens   int64
}

// add adds ms of stream time, summed over the streams that ran, and the tokens that came in this time.
func (s *streamSum) add(ms float64, tokens int64) {
	s.streamMs, s.tokens = s.streamMs+ms, s.tokens+tokens
}

// msPerToken is the mean time between two tokens of one stream, in ms; 0: fewer than leastTokens tokens came.
func (s streamSum) msPerToken(leastTokens int64) float64 {
	if s.tokens < leastTokens {
		return 0
	}
	return s.streamMs / float64(s.tokens)
}

// measurePaces returns the pace of each rank in the newest sample, by Rank.ID: its time per token over the last paceWindow (tokenMs) and in
// each of the last spans (spanMs), and its recent answers.
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

// recentAnswers counts a rank's answers of the last minute or, if these are too few to judge, of the last five minutes. record is the
// newest record of the rank.
func (r *Ring) recentAnswers(record *RankAt) AnswerCounts {
	ofMinute := record.answersSince(r.oldestRecordWithin(record.ID, time.Minute))
	if ofMinute.Answers >= fewAnswers {
		return ofMinute
	}
	return record.answersSince(r.oldestRecordWithin(record.ID, SecondsKeptFor))
}

// tokenTimes returns a rank's mean time between two tokens of an answer, in ms: over the last paceWindow (tokenMs), and in each span of the
// last minute (spanMs), for the comparison with other ranks. 0: too little was measured. record is the newest record of the rank.
func (r *Ring) tokenTimes(record *RankAt) (tokenMs float64, spanMs [spans]float64) {
	bySpan, recent, minute := r.streamsOf(record)
	for i := range bySpan {
		spanMs[i] = bySpan[i].msPerToken(minSpanTokens)
		aStreamRan := bySpan[i].streamMs >= float64(span.Milliseconds()) // one for the whole span, or several for parts of it
		if spanMs[i] == 0 && aStreamRan {                                // without a stream, the rank was idle, and not slow
			// Too few tokens came for a mean of this span, so the mean of the minute stands for it. It is from more tokens, or
			// very large if even the minute has hardly any.
			spanMs[i] = minute.streamMs / float64(max(1, minute.tokens))
		}
	}
	return recent.msPerToken(minPaceTokens), spanMs
}

// streamsOf sums up the streams of a rank: in each of the last spans, in the last paceWindow (recent), and in all spans together (minute).
// A sum has the time of all streams that ran, and their tokens; the quotient is the time per token of one stream. record is the newest
// record of the rank, from which streamsOf goes back in time, from sample to sample.
func (r *Ring) streamsOf(record *RankAt) (bySpan [spans]streamSum, recent, minute streamSum) {
	list := r.fine.list // one sample per second, the newest last
	now := list[len(list)-1].At
	later := record
	for i := len(list) - 2; i >= 0; i-- {
		age := now.Sub(list[i].At)
		index := int((age - 1) / span) // the span in which the time between the samples i and i+1 begins; 0: up to one span ago
		before := list[i].rank(record.ID)
		isUnknown := before == nil || before.Output <= 0 // the rank was not there, or had given no tokens
		if index >= spans || isUnknown || later.Output < before.Output {
			break // the minute ends here, or nothing earlier is known, or earlier totals are of another engine process
		}
		// Each running stream counts for the time between the two samples. How many ran is known only at its begin and its end, so
		// the mean of both is taken.
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

// oldestRecordWithin is the oldest record of a rank that is no older than age; nil: there is none.
func (r *Ring) oldestRecordWithin(id int32, age time.Duration) *RankAt {
	list := r.fine.list
	now := list[len(list)-1].At
	from, _ := slices.BinarySearchFunc(list, now.Add(-age), func(s Sample, at time.Time) int { return s.At.Compare(at) })
	for i := from; i < len(list); i++ { // from the oldest sample on: the rank may have come later
		if record := list[i].rank(id); record != nil {
			return record
		}
	}
	return nil
}

// rank returns the record of a rank; nil: the sample has none.
func (s *Sample) rank(id int32) *RankAt {
	if i, ok := s.rankIndex[id]; ok {
		return &s.Ranks[i]
	}
	return nil
}

// answersSince counts the answers since an earlier record. It returns zero without a record (nil), or if the counts have become smaller:
// then the record belongs to another rank.
func (r *RankAt) answersSince(before *RankAt) AnswerCounts {
	if before == nil || before.Answers > r.Answers || before.Empty > r.Empty {
		return AnswerCounts{}
	}
	return AnswerCounts{r.Answers - before.Answers, r.Empty - before.Empty}
}

// fillInPaces fills in the token times and the recent answers of the group's ranks, the median token time of the group, and the times of
// ranks that were slow in several spans. A rank that takes no part in the steps keeps zeros.
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

// fillInSlowRanks fills in SlowMs and OthersMs of the ranks that were slow in several spans: much slower than the group's median rank. For
// the other ranks, both become 0. Ranks that take no part in the group's steps (InSteps is false), for example because they are down, are
// left out.
func (g *Group) fillInSlowRanks(ranks map[int32]pace) {
	var all []float64 // token times of all ranks in one span, in ms
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
	if g.Rounds != nil { // the ranks also prefill, and each prompt makes a rank slow for a while, which is no fault
		leastSpans = slowSpansBoth
	}
	for k := range g.Ranks {
		g.Ranks[k].SlowMs, g.Ranks[k].OthersMs = slow[k].mean(leastSpans) // 0 if it was slow in fewer spans
	}
}

// slowSpanSums counts the spans in which a rank was slow, and sums up the times per token in them.
type slowSpanSums struct {
	spans            int
	rankMs, middleMs float64 // times per token, summed over the slow spans: of the rank, and of the group's median rank
}

// add counts one more span in which the rank was slow. ms and middle are the times per token of the rank and of the median rank.
func (s *slowSpanSums) add(ms, middle float64) {
	s.spans, s.rankMs, s.middleMs = s.spans+1, s.rankMs+ms, s.middleMs+middle
}

// mean returns the mean time per token in these spans, in ms, of the rank and of the median rank; 0: there are fewer than leastSpans spans.
func (s *slowSpanSums) mean(leastSpans int) (ms, others float64) {
	if s.spans < leastSpans {
		return 0, 0
	}
	return s.rankMs / float64(s.spans), s.middleMs / float64(s.spans)
}

// median returns the median of the numbers and sorts them; 0: there are none.
func median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return stats.Median(all)
}
