package openai

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

const metadata = `"http://169.254.169.254/x"`

// An engine reads media wherever it looks for them, whatever stands beside.
func TestMediaAreFoundWhereverTheyStand(t *testing.T) {
	for _, row := range []struct{ body, code, param string }{
		{`"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":` + metadata + `}}]}]`, CodeInvalidValue, "messages[0].content[0].image_url.url"},
		{`"messages":[{"role":"user","image_url":null,"content":[{"type":"image_url","image_url":{"url":` + metadata + `}}]}]`, CodeInvalidValue, "messages[0].content[0].image_url.url"},
		{`"messages":[{"role":"user","input_audio":null,"content":[{"image_url":` + metadata + `}]}]`, CodeInvalidValue, "messages[0].content[0].image_url"},
		{`"messages":[{"role":"user","input_audio":{"data":"a"},"content":[{"image_url":` + metadata + `}]}]`, CodeInvalidValue, "messages[0].content[0].image_url"},
		{`"messages":[{"content":[{"type":"text","text":"a","image_url":null,"x":[1,{"image_url":` + metadata + `}]}]}]`, CodeInvalidValue, "messages[0].content[0].x[1].image_url"},
		{`"messages":[{"content":[{"image\u005furl":` + metadata + `}]}]`, CodeInvalidValue, "messages[0].content[0].image_url"},
		{`"messages":[{"content":[{"type":"image_url","uuid":"other"}]}]`, CodeMissing, "messages[0].content[0].image_url"},
		{`"messages":[{"content":[{"type":"input_image","uuid":"other"}]}]`, CodeMissing, "messages[0].content[0].image_url"},
		{`"messages":[{"content":[{"type":"image_pil","uuid":"other"}]}]`, CodeUnsupported, "messages[0].content[0].type"},
		{`"queries":[{"content":[{"type":"image_url","image_url":{"url":` + metadata + `}}]}]`, CodeInvalidValue, "queries[0].content[0].image_url.url"},
		{`"data":{"image_url":null,"data":` + metadata + `}`, CodeInvalidValue, "data.data"},
		{`"data":["a",[` + metadata + `]]`, CodeInvalidValue, "data[1][0]"},
		{`"data":{"data":"a","data_format":"path"}`, CodeUnsupported, "data.data_format"},
		{`"data":{"data":"a","out_data_format":"path"}`, CodeUnsupported, "data.out_data_format"},
		{`"data":{"data":"a","data_format":7}`, CodeUnsupported, "data.data_format"},
		{`"data":{"data":"/etc/passwd"}`, CodeInvalidValue, "data.data"},
		{`"data":{"data":"/9j/../etc/passwd"}`, CodeInvalidValue, "data.data"},
		{`"data":"File:/etc/passwd"`, CodeInvalidValue, "data"},
	} {
		_, e := ParsePassed([]byte(`{"model":"m",`+row.body+`}`), Limits{})
		require.NotNil(t, e, row.body)
		require.Equal(t, row.code, e.Code, row.body)
		require.Equal(t, row.param, e.Param, row.body)
	}
	for _, body := range []string{
		`"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}},{"type":"text","text":"a"}]}]`,
		`"data":{"data":"/9j/4AAQSkZJRg==","data_format":"b64_json","out_data_format":null}`,
		`"data":{"data":["` + "AAAA" + `"],"data_format":"bytes"}`,
		`"tools":[{"type":"function","function":{"parameters":{"properties":{"image_url":{"type":"string"}}}}}]`,
		`"input":[[1,2],[3]]`,
	} {
		_, e := ParsePassed([]byte(`{"model":"m",`+body+`}`), Limits{})
		require.Nil(t, e, body)
	}
}

func TestAMediumIsNoTextOnce(t *testing.T) {
	image := `{"image_url":{"url":"data:` + strings.Repeat("A", 1000) + `"}}`
	for _, part := range []string{image, `{"type":"input_audio","input_audio":{"data":"a","x":` + image + `}}`} {
		req, e := ParsePassed([]byte(`{"model":"m","messages":[{"content":[`+part+`]}]}`), Limits{})
		require.Nil(t, e)
		require.Positive(t, req.PromptBytes)
		require.Less(t, req.PromptBytes, 120)
	}
}

func TestMediaOfAResponse(t *testing.T) {
	for _, row := range []struct{ body, param string }{
		{`"input":[{"role":"user","image_url":null,"content":[{"type":"input_image","image_url":` + metadata + `}]}]`, "input[0].content[0].image_url"},
		{`"input":[{"role":"user","content":[{"type":"input_image","uuid":"other"}]}]`, "input[0].content[0].image_url"},
		{`"input":[{"role":"user","content":[{"type":"input_file","file_url":` + metadata + `}]}]`, "input[0].content[0].file_url"},
		{`"input":"x","previous_input_messages":[{"role":"user","content":[{"image_url":` + metadata + `}]}]`, "previous_input_messages"},
		{`"input":"x","tools":[{"type":5}]`, "tools[0].type"},
		{`"input":"x","n":2`, "n"},
		{`"input":"x","best_of":2`, "best_of"},
		{`"input":"x","use_beam_search":true`, "use_beam_search"},
		{`"input":"x","prompt_logprobs":1`, "prompt_logprobs"},
		{`"input":"x","min_tokens":-1`, "min_tokens"},
		{`"input":"x","min_tokens":5,"max_output_tokens":4`, "min_tokens"},
	} {
		_, e := Parse(mooncake.Responses, []byte(`{"model":"m",`+row.body+`}`), Limits{})
		require.NotNil(t, e, row.body)
		require.Equal(t, row.param, e.Param, row.body)
	}
	_, e := Parse(mooncake.Responses, []byte(`{"model":"m","input":"x","previous_input_messages":null,"n":1,"min_tokens":1,"use_beam_search":false}`), Limits{})
	require.Nil(t, e)
}

// form is a form of a model and of one field with the headers.
func form(headers string) []byte {
	return []byte("--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b\r\n" + headers + "\r\n{}\r\n--b--\r\n")
}

const formKind = "multipart/form-data; boundary=b"

// Parsers of forms differ in what they make of headers that are odd.
func TestAFieldThatTwoParsersMayReadOtherwiseIsRefused(t *testing.T) {
	const plain = "Content-Disposition: form-data; name=\"x\"\r\n"
	for _, headers := range []string{
		plain + "Content-Disposition: form-data; name=\"vllm_xargs\"\r\n",
		plain + "content-disposition: form-data; name=\"priority\"\r\n",
		plain + "Content-Type: text/plain\r\nContent-Type: text/html\r\n",
		plain + "X-Other: 1\r\n",
		plain + " folded; name=\"priority\"\r\n",
		"Content-Type: text/plain\r\n",
		"Content-Disposition: form-data; name=\"x\"; NAME*0=\"vllm_\"; NAME*1=\"xargs\"\r\n",
		"Content-Disposition: form-data; name=\"x\"; NAME*=utf-8''vllm_xargs\r\n",
		"Content-Disposition: form-data; name=\"x\"; name=\"priority\"\r\n",
		"Content-Disposition: form-data; name=x\"\"vllm_xargs\r\n",
	} {
		_, e := ParseForm(form(headers), formKind, Limits{})
		require.NotNil(t, e, headers)
		require.Equal(t, 400, e.Status)
	}
	for _, headers := range []string{plain, plain + "Content-Type: text/plain\r\nContent-Transfer-Encoding: 8bit\r\n"} {
		_, e := ParseForm(form(headers), formKind, Limits{})
		require.Nil(t, e, headers)
	}
}

func FuzzParseForm(f *testing.F) {
	f.Add(form("Content-Disposition: form-data; name=\"x\"\r\n"))
	f.Add(form("Content-Disposition: form-data; name=\"x\"; filename=\"a\"\r\n"))
	f.Add(form("Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"priority\"\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		req, e := ParseForm(raw, formKind, Limits{})
		if e != nil {
			require.Equal(t, 400, e.Status)
			return
		}
		require.NotEmpty(t, req.Model)
		require.GreaterOrEqual(t, req.PromptBytes, 0)
	})
}
