"""instructor: typed answers by each of its modes, whole and in parts."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel
from told import ASK, MODEL, OPENAI_URL, tell


class Weather(BaseModel):
    mood: Literal["calm", "rough"]
    degrees: Literal[10, 20]


forms, partial = [], []
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(OpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0), mode=mode)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "response_model": Weather}
    forms.append(client.create(**asked, max_retries=0).model_dump())
    partial.append([one.model_dump() for one in client.create_partial(**asked)][-1])
tell(forms=forms, partial=partial)
