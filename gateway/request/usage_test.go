package request

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

// Some engines tell the usage with the last chunk, and report no details of the
// prompt.
func TestTheUsageReachesTheClientHoweverItIsTold(t *testing.T) {
	t.Parallel()
	const usage = `{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2`
	const want = `"usage":` + usage + `,"prompt_tokens_details":{"cached_tokens":5}}`
	u := &unruly{probe: tell}
	u.decode = func(w *script, _ *http.Request) {
		w.send(oneEvent + strings.Replace(lastEvent, `}]}`, `}],"usage":`+usage+`}}`, 1) + doneEvent)
	}
	b := misled(t, u)
	r := b.post(mooncake.Chat.Path(), chat("a", `"stream":true,"stream_options":{"include_usage":true},`))
	require.Contains(t, r.body, `"choices":[],`+want, "an event of its own")
	require.Equal(t, 1, strings.Count(r.body, `"prompt_tokens"`), r.body)
	require.True(t, strings.HasSuffix(r.body, doneEvent))
	require.Contains(t, b.post(mooncake.Chat.Path(), chat("a", "")).body, want)
	require.NotContains(t, b.post(mooncake.Chat.Path(), chat("a", `"stream":true,`)).body, "usage", "nobody asked for it")
	b.settle()
}

// An engine that ends its answer behind the finish_reason has not told the usage. It is told in the
// engine's place.
func TestAUsageThatTheEngineDidNotTell(t *testing.T) {
	t.Parallel()
	u := &unruly{probe: tell}
	u.decode = func(w *script, _ *http.Request) { w.send(oneEvent + lastEvent) }
	b := misled(t, u)
	for _, form := range []string{"", `"stream":true,"stream_options":{"include_usage":true},`} {
		r := b.post(mooncake.Chat.Path(), chat("a", form))
		require.Equal(t, http.StatusOK, r.status)
		require.Contains(t, r.body, `"usage":{"prompt_tokens":7,`, form)
		require.NotContains(t, r.body, "error")
	}
	b.settle()
	require.EqualValues(t, 2, b.Dispatcher.Status(t.Context()).Models[0].Workers[0].NoUsage)
}

// An engine may fail behind the usage and before its [DONE]. The client then gets the engine's
// usage with all its counts, and no second
// one: whether the usage has come in an event of its own or not, and also if it is a part of the sum of several answers.
func TestTheUsageIsToldOnceIfTheEngineFailsBehindIt(t *testing.T) {
	t.Parallel()
	const usage = `"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"audio_tokens":4}}}`
	for _, end := range []string{
		lastEvent + `data: {"id":"d","choices":[],` + usage + "\n\n", strings.Replace(lastEvent, `]}`+"\n", "],"+usage+"\n", 1),
	} {
		for answers := range 2 {
			u := &unruly{probe: tell}
			var b *bed
			u.decode = func(w *script, r *http.Request) {
				w.send(oneEvent)
				// A failure before the first event would only bring another attempt.
				for b.begun() <= answers && r.Context().Err() == nil {
					time.Sleep(time.Millisecond)
				}
				w.send(end + "data: [DO")
			}
			b = misled(t, u)
			const streamed = `"stream":true,"stream_options":{"include_usage":true},`
			r := b.post(mooncake.Chat.Path(), chat("a", fmt.Sprintf(`"n":%d,`, answers+1)+streamed))
			require.Equal(t, 1, strings.Count(r.body, `"prompt_tokens"`), r.body)
			require.Contains(t, r.body, `"audio_tokens":4`)
			require.Equal(t, answers+1, strings.Count(r.body, `"stop"`), r.body)
			require.True(t, strings.HasSuffix(r.body, doneEvent), r.body)
			require.NotContains(t, r.body, "error")
			b.settle()
		}
	}
}

// Answers whose engine told no usage are counted for its rank, whether the client asked for one or
// not. Others are not, nor are answers that are not whole.
func TestAnswersWithoutUsageAreCounted(t *testing.T) {
	t.Parallel()
	const usage = `data: {"id":"d","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}` + "\n\n"
	for _, row := range []struct {
		name, more, events string
		want               uint64
	}{
		{"a stream without", `"stream":true,`, wholeEvents, 1},
		{"a stream without, which was to have one", `"stream":true,"stream_options":{"include_usage":true},`, wholeEvents, 1},
		{"a stream with", `"stream":true,`, oneEvent + lastEvent + usage + doneEvent, 0},
		{"an answer in one piece without", "", wholeEvents, 1},
		{"an answer in one piece with", "", oneEvent + lastEvent + usage + doneEvent, 0},
		{"two answers without", `"n":2,`, wholeEvents, 2},
		{"a stream that breaks off", `"stream":true,`, oneEvent, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := misled(t, &unruly{probe: tell, decode: func(w *script, _ *http.Request) { w.send(row.events) }})
			b.post(mooncake.Chat.Path(), chat("a", row.more))
			b.settle()
			require.Equal(t, row.want, b.Dispatcher.Status(t.Context()).Models[0].Workers[0].NoUsage)
		})
	}
}

// More tokens than the answer may have are not told, however they are estimated.
func TestAnEstimatedUsageBreaksNoAnswer(t *testing.T) {
	t.Parallel()
	u := &unruly{probe: tell}
	const event = `data: {"id":"d","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":%s}]}` + "\n\n"
	u.decode = func(w *script, _ *http.Request) {
		w.send(strings.Repeat(fmt.Sprintf(event, "null"), 60) + fmt.Sprintf(event, `"stop"`))
	}
	b := misled(t, u)
	r := b.post(mooncake.Chat.Path(), chat("a", `"max_tokens":16,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Contains(t, r.body, `"completion_tokens":16`)
	b.settle()
}

// Of several answers the client gets one usage, with every count of the engines in
// it. The prompt counts once.
func TestTheUsageOfSeveralAnswersHasAllCounts(t *testing.T) {
	t.Parallel()
	u := &unruly{probe: tell}
	u.decode = func(w *script, _ *http.Request) {
		w.send(oneEvent + lastEvent + `data: {"id":"d","choices":[],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":3}}}` + "\n\n" + doneEvent)
	}
	b := misled(t, u)
	for _, form := range []string{`"n":2,`, `"n":2,"stream":true,"stream_options":{"include_usage":true},`} {
		var chunk struct{ Usage json.RawMessage }
		for line := range strings.Lines(b.post(mooncake.Chat.Path(), chat("a", form)).body) {
			if at := strings.Index(line, `"usage":{`); at >= 0 {
				require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(line, "data: ")), &chunk))
			}
		}
		require.JSONEq(t, `{"prompt_tokens":7,"total_tokens":11,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":5,"created_cache_tokens":3}}`, string(chunk.Usage), form)
	}
	b.settle()
}
