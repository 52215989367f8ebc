package trace

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const (
	azureHead = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
	azureRows = "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
	lineA     = `{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}`
	lineB     = `{"timestamp": 3000, "input_length": 10, "output_length": 1, "hash_ids": []}`
)

var (
	azureWant = []Request{{Prompt: 374, Output: 44}, {At: 4314579 * time.Microsecond, Prompt: 396, Output: 109}}
	moonWant  = []Request{{Prompt: 6758, Output: 500, HashIDs: []uint64{0, 1, 2}},
		{At: 3 * time.Second, Prompt: 10, Output: 1, HashIDs: []uint64{}}}
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		format   Format
		want     []Request
	}{
		{"Azure's own file", azureHead + azureRows, AzureCSV, azureWant},
		{"LF, and no newline at the end", strings.TrimSuffix(strings.ReplaceAll(azureHead+azureRows, "\r", ""), "\n"), AzureCSV, azureWant},
		{"empty lines", "\r\n" + azureHead + "\n  \n" + azureRows + "\r\n\r\n", AzureCSV, azureWant},
		{"a byte order mark", "\xef\xbb\xbf" + azureHead + azureRows, AzureCSV, azureWant},
		{"no header", azureRows, AzureCSV, azureWant},
		{"other names, order and columns", "id,Output Tokens,prompt_tokens,arrived_at\n7,44,374,2023-11-16 18:15:46.6805900\n8,109,396,2023-11-16 18:15:50.9951690\n", AzureCSV, azureWant},
		{"quotes and spaces", "\"TIMESTAMP\", \"ContextTokens\", \"GeneratedTokens\"\n\"2023-11-16 18:15:46.68059\", \"374\", 44\n2023-11-16 18:15:50.995169,396,109\n", AzureCSV, azureWant},
		{"the zone of Azure's 2024 release", azureHead + "2024-05-10 00:00:00.009930+00:00,374,44\n2024-05-10 02:00:04.324509+02:00,396,109\n", AzureCSV, azureWant},
		{"RFC 3339 with and without a zone", azureHead + "2024-05-10T00:00:00.5Z,374,44\n2024-05-10T00:00:04.814579,396,109\n", AzureCSV, azureWant},
		{"seconds in place of dates, floats in place of counts", azureHead + "10.0,374.0,44\n14.314579,396,109.0\n", AzureCSV, azureWant},
		{"BurstGPT's own header", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,374,44,418,Conversation log\n9.314579,GPT-4,396,109,505,API log\n", AzureCSV, azureWant},
		{"natural names, as Mooncake has them", "timestamp,input_length,output_length\n0,374,44\n4.314579,396,109\n", AzureCSV, azureWant},
		{"milliseconds, as the name of the column says", "timestamp_ms,prompt_len,output_len\n100,374,44\n4414.579,396,109\n", AzureCSV, azureWant},
		{"a unit in brackets", "arrival time (ms),ISL,OSL\n100,374,44\n4414.579,396,109\n", AzureCSV, azureWant},
		{"tabs", "ts\tprompt_tokens\tcompletion_tokens\n0\t374\t44\n4.314579\t396\t109\n", AzureCSV, azureWant},
		{"semicolons", "time;input_tokens;output_tokens\n0;374;44\n4.314579;396;109\n", AzureCSV, azureWant},
		{"commas and quotes in a text beside the values", "timestamp,prompt,input_length,output_length\n0,\"Say \"\"hello\"\", please\",374,44\n4.314579,\"and, now\",396,109\n", AzureCSV, azureWant},
		{"evenkeel's request log", `{"request":"r1","arrival":"2026-01-02T15:04:05Z","model":"m","prompt_tokens":374,"cached_tokens":9,"output_tokens":44}` + "\n" + `{"request":"r2","arrival":"2026-01-02T15:04:09.314579Z","model":"m","prompt_tokens":396,"output_tokens":109}`, MooncakeJSONL, azureWant},
		{"seconds in JSON, as the name says", `{"arrival_s": 1.5, "prompt_len": 374, "output_len": 44}` + "\n" + `{"arrival_s": "5.814579", "prompt_len": "396", "output_len": 109.0}`, MooncakeJSONL, azureWant},
		{"Mooncake's own file", lineA + "\n" + lineB + "\n", MooncakeJSONL, moonWant},
		{"CRLF and empty lines", "\n" + lineA + "\r\n\r\n" + lineB + "\r\n", MooncakeJSONL, moonWant},
		{"members of other releases", `{"type":"chat","chat_id":4,"timestamp":1500.5,"input_length":1,"output_length":2,"hash_ids":null}`, MooncakeJSONL, []Request{{Prompt: 1, Output: 2}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, format := range []Format{"", Auto, tt.format} {
				got, err := Parse(strings.NewReader(tt.in), Options{Format: format})
				require.NoError(t, err)
				require.Equal(t, tt.want, got.Requests, "format %q", format)
				require.Equal(t, tt.format, got.Format)
				require.Empty(t, got.Notes())
			}
		})
	}
}

func TestParseSaysWhereAndWhat(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		format   Format
		want     []string
	}{
		{"nothing at all", "", Auto, []string{"f: no requests"}},
		{"a header only", azureHead, Auto, []string{"f: no requests (1 lines"}},
		{"only rows that generate nothing", azureHead + "2023-11-16 18:15:46,3,0\n", Auto, []string{"1 rows without output"}},
		{"another CSV", "a,b,c\n1,2,3\n", Auto, []string{"f:1", "no column TIMESTAMP"}},
		{"a column is missing", "TIMESTAMP,ContextTokens\n", Auto, []string{"f:1", "no column GeneratedTokens"}},
		{"a column twice", "TIMESTAMP,ContextTokens,prompt_tokens,GeneratedTokens\n", Auto, []string{"f:1", "columns 2 and 3"}},
		{"a row too short", azureHead + azureRows + "2023-11-16 18:15:46,3\n", Auto, []string{"f:4", "2 columns instead of 3"}},
		{"a date that is none", azureHead + "2023-13-16 18:15:46,3,4\n", Auto, []string{"f:2", "2023-13-16", "2023-11-16 18:15:46"}},
		{"a date long ago", azureHead + "0023-11-16 18:15:46,3,4\n", Auto, []string{"f:2", "not between 1970"}},
		{"words for a count", azureHead + "2023-11-16 18:15:46,many,4\n", Auto, []string{"f:2", "ContextTokens", `"many"`}},
		{"half a token", azureHead + "2023-11-16 18:15:46,3,4.5\n", Auto, []string{"f:2", "GeneratedTokens", "4.5"}},
		{"fewer than no tokens", azureHead + "2023-11-16 18:15:46,-3,4\n", Auto, []string{"f:2", "ContextTokens is -3"}},
		{"NaN", azureHead + "NaN,3,4\n", Auto, []string{"f:2", "NaN"}},
		{"a Mooncake line cut off", lineA + "\n" + lineB[:30] + "\n", Auto, []string{"f:2", "Mooncake record"}},
		{"a Mooncake line without a length", `{"timestamp":0,"output_length":3}`, Auto, []string{"f:1", "no input_length"}},
		{"a Mooncake line without a time", `{"input_length":0,"output_length":3}`, Auto, []string{"f:1", "no timestamp"}},
		{"a time before the start", strings.Replace(lineA, ": 0", ": -1", 1), Auto, []string{"f:1", "timestamp is -1"}},
		{"a hash that is no number", strings.Replace(lineA, "[0", "[\"a\"", 1), Auto, []string{"f:1", "hash_ids"}},
		{"two records on a line", lineA + lineB, Auto, []string{"f:1", "more than one record"}},
		{"CSV read as Mooncake", azureHead + azureRows, MooncakeJSONL, []string{"f:1", "Mooncake record"}},
		{"Mooncake read as CSV", lineA, AzureCSV, []string{"f:1", "begins with {"}},
		{"a list in JSON", `[{"timestamp":0,"input_length":1,"output_length":2}]`, Auto, []string{"f:1", "jq -c '.[]'"}},
		{"Parquet", "PAR1\x15\x00", Auto, []string{"f:1", "Parquet", "as CSV"}},
		{"another JSON", `{"question": 1}`, Auto, []string{"f:1", "no timestamp", "when a request arrived", "docs/traces.md"}},
		{"a member twice", `{"arrival":1,"timestamp":"x","prompt_len":1,"isl":1,"osl":2}`, Auto, []string{"f:1"}},
		{"two members for one value", `{"arrival":1,"prompt_len":1,"isl":1,"osl":2}`, Auto, []string{"f:1", `"isl" and "prompt_len" both name the same value`}},
		{"words for a count, under its own name", "timestamp,input_length,output_length\n0,many,4\n", Auto, []string{"f:2", `input_length is "many"`}},
		{"a format nobody knows", azureHead, "parquet", []string{"f:1", `"parquet"`, "azure", "mooncake"}},
		{"gzip that is none", "\x1f\x8bxx", Auto, []string{"f:", "damaged"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse(strings.NewReader(tt.in), Options{Format: tt.format, Name: "f"})
			require.Error(t, err)
			for _, want := range tt.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

func TestWhatIsChangedOnReadingIsSaid(t *testing.T) {
	in := azureHead + "2023-11-16 18:00:09,9,1\n2023-11-16 18:00:07,7,1\n2023-11-16 18:00:09,10,1\n2023-11-16 18:00:01,1,0\n2023-11-16 " +
		"18:00:02,0,5\n"
	got, err := Parse(strings.NewReader(in), Options{})
	require.NoError(t, err)
	require.Equal(t, []Request{{Prompt: 7, Output: 1}, {At: 2 * time.Second, Prompt: 9, Output: 1},
		{At: 2 * time.Second, Prompt: 10, Output: 1}}, got.Requests,
		"sorted, equal times in the file's order, times from the first request kept")
	require.Equal(t, 1, got.NoOutput)
	require.Equal(t, 1, got.NoPrompt)
	require.True(t, got.Unsorted)
	require.Len(t, got.Notes(), 3)

	got, err = Parse(strings.NewReader(strings.Replace(lineA, "6758", "513", 1)), Options{})
	require.NoError(t, err)
	require.Equal(t, []uint64{0, 1}, got.Requests[0].HashIDs, "513 tokens are two blocks")
	require.Equal(t, 1, got.CutHashes)
	require.Len(t, got.Notes(), 1)
}

func TestMillisecondsWithoutTheirUnitAreDoubted(t *testing.T) {
	for name, doubted := range map[string]bool{"timestamp": true, "timestamp_ms": false} {
		in := strings.Builder{}
		in.WriteString(name + ",input_length,output_length\n")
		for i := range 30 {
			fmt.Fprintf(&in, "%d,10,5\n", i*3000)
		}
		got, err := Parse(strings.NewReader(in.String()), Options{})
		require.NoError(t, err)
		require.Equal(t, doubted, got.Slow, name)
	}
}

func TestMaxStopsReading(t *testing.T) {
	in := azureHead + azureRows + "this is never read\n"
	got, err := Parse(strings.NewReader(in), Options{Max: 2})
	require.NoError(t, err)
	require.Equal(t, azureWant, got.Requests)
	require.True(t, got.Cut)

	got, err = Parse(strings.NewReader(azureHead+azureRows+"\r\n"), Options{Max: 2})
	require.NoError(t, err)
	require.False(t, got.Cut, "there was no third")

	_, err = Parse(strings.NewReader(in), Options{Max: -1})
	require.ErrorContains(t, err, "0 for all")
}

func TestReadAFileAlsoGzipped(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, err := w.Write([]byte(lineA + "\n" + lineB + "\n"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	path := filepath.Join(t.TempDir(), "t.jsonl.gz")

	require.NoError(t, os.WriteFile(path, z.Bytes(), 0o600))
	got, err := Read(path, Options{})
	require.NoError(t, err)
	require.Equal(t, moonWant, got.Requests)

	require.NoError(t, os.WriteFile(path, z.Bytes()[:z.Len()-4], 0o600))
	_, err = Read(path, Options{})
	require.ErrorContains(t, err, path, "a file cut off is not a shorter trace")

	_, err = Read(path+".none", Options{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestTheEmbeddedTraces(t *testing.T) {
	azure := Azure()
	require.Empty(t, azure.Notes())
	require.Equal(t, time.Date(2023, 11, 16, 18, 15, 46, 680590000, time.UTC), azure.Start)
	require.Equal(t, Request{Prompt: 374, Output: 44}, azure.Requests[0])
	s := azure.Summary()
	require.Equal(t, 19_366, s.Requests)
	require.Equal(t, azure.Requests[s.Requests-1].At, s.Duration)
	require.InDelta(t, 59, s.Duration.Minutes(), 1)
	require.InDelta(t, 1155, s.Prompt.Mean, 1)
	require.InDelta(t, 211, s.Output.Mean, 1)
	require.Contains(t, s.String(), "19366 requests in 58m")

	moon := Mooncake()
	require.Empty(t, moon.Notes())
	require.Equal(t, Request{Prompt: 6758, Output: 500, HashIDs: []uint64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}}, moon.Requests[0])
	s = moon.Summary()
	require.Equal(t, 12_031, s.Requests)
	require.InDelta(t, 59, s.Duration.Minutes(), 1)
	require.InDelta(t, 12_035, s.Prompt.Mean, 1)
	require.InDelta(t, 343, s.Output.Mean, 1)
	for i := range moon.Requests {
		require.Len(t, moon.Requests[i].HashIDs, (moon.Requests[i].Prompt+BlockTokens-1)/BlockTokens)
		require.NotZero(t, moon.Requests[i].PromptKey())
	}
}

func TestWhereKeepsTimes(t *testing.T) {
	all, err := Parse(strings.NewReader(azureHead+azureRows), Options{})
	require.NoError(t, err)
	long := all.Where(func(r Request) bool { return r.Output >= 100 })
	require.Equal(t, azureWant[1:], long.Requests)
	require.Equal(t, all.Format, long.Format)
	require.Len(t, all.Requests, 2)
}

func TestSummary(t *testing.T) {
	var tr Trace
	require.Zero(t, tr.Summary())
	for i := range 100 { // 100, 99, ... 1
		tr.Requests = append(tr.Requests, Request{At: time.Duration(i) * time.Second, Prompt: 100 - i, Output: 7})
	}
	require.Equal(t, Summary{
		Requests: 100, Duration: 99 * time.Second,
		Prompt: Stats{Mean: 50.5, P50: 50, P90: 90, P99: 99, Max: 100},
		Output: Stats{Mean: 7, P50: 7, P90: 7, P99: 7, Max: 7},
	}, tr.Summary())
}

func TestAnyTraceReadsTheSameInBothFormats(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		times := rapid.SliceOfN(rapid.IntRange(0, 3_600_000), 1, 50).Draw(t, "ms")
		csv, jsonl := strings.Builder{}, strings.Builder{}
		csv.WriteString(azureHead)
		start := time.Date(2023, 11, 16, 0, 0, 0, 0, time.UTC)
		for i, ms := range times {
			at := start.Add(time.Duration(ms) * time.Millisecond).Format("2006-01-02 15:04:05.0000000")
			fmt.Fprintf(&csv, "%s,%d,%d\r\n", at, i+1, i+2)
			fmt.Fprintf(&jsonl, "{\"timestamp\": %d, \"input_length\": %d, \"output_length\": %d}\n", ms, i+1, i+2)
		}
		a, err := Parse(strings.NewReader(csv.String()), Options{})
		require.NoError(t, err)
		b, err := Parse(strings.NewReader(jsonl.String()), Options{})
		require.NoError(t, err)
		require.Equal(t, a.Requests, b.Requests)
		require.Equal(t, !slices.IsSorted(times), a.Unsorted)
		require.Len(t, a.Requests, len(times))
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(azureHead + azureRows))
	f.Add([]byte(azureRows))
	f.Add([]byte(lineA + "\n" + lineB))
	f.Add([]byte("\"timestamp\",input_length,output_length\n1e3,2.0,3\n\n0,1,1"))
	f.Add([]byte("\x1f\x8b\x08\x00"))
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := Parse(bytes.NewReader(in), Options{Name: "f"})
		if err != nil {
			require.True(t, strings.HasPrefix(err.Error(), "f:"), "%v", err)
			return
		}
		require.NotEmpty(t, got.Requests)
		require.Zero(t, got.Requests[0].At)
		last := time.Duration(0)
		for _, r := range got.Requests {
			require.GreaterOrEqual(t, r.At, last)
			require.Positive(t, r.Prompt)
			require.Positive(t, r.Output)
			require.LessOrEqual(t, len(r.HashIDs), (r.Prompt+BlockTokens-1)/BlockTokens)
			last = r.At
		}
		require.LessOrEqual(t, got.Summary().Prompt.P99, got.Summary().Prompt.Max)
	})
}

func BenchmarkAzure(b *testing.B) {
	b.SetBytes(int64(len(azureCSV)))
	b.ReportAllocs()
	for b.Loop() {
		Azure()
	}
}
